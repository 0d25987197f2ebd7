"""``python -m epinorm`` is the command ``epinorm``."""

from epinorm.cli import main

if __name__ == "__main__":
    main()

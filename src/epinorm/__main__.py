"""``python -m epinorm`` is the command ``epinorm``."""

from epinorm_cli import main

if __name__ == "__main__":
    main()

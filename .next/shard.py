"""pytest -p shard: every SHARD=i/n-th item."""
import os
def pytest_collection_modifyitems(config, items):
    i, n = map(int, os.environ["SHARD"].split("/"))
    items[:] = items[i::n]

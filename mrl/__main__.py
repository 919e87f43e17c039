"""`python -m mrl` is `mrl`."""

from mrl.cli import command

if __name__ == "__main__":
    command()

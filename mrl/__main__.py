"""`python -m mrl` is `mrl`."""

from mrl.cli import main

if __name__ == "__main__":
    main(prog_name="mrl")

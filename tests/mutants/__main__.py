import sys

from tests.mutants.runner import run, survivors
from tests.mutants.table import MUTANTS


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in str(mutant) for word in words)]
    found = survivors(run(chosen, say=lambda line: print(line, flush=True)))
    print(f"{len(chosen) - len(found)} of {len(chosen)} mutants are caught", *found, sep="\n")
    return bool(found) or not chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

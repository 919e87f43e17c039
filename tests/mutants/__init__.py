"""Mutation tests: small faults in a copy of the tree, each of which some test must catch.

`python -m tests.mutants [WORDS]`. WORDS: of the mutants' files or texts; without any, all mutants of table.py run. The
survivors are printed, and there should be none.
"""

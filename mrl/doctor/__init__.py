"""`mrl doctor`: what this machine has, what of it a run will use, and what to do about the rest.

Nothing here imports a package that may be broken: those are imported by processes of their own (probe.py, used.py),
and what ends one is a finding. Each section is a function that returns its findings; `examine` calls
them all.
"""

"""What only a GPU shows, on one GPU: `python -m tests.gpu` runs every case of cases.py, each in a process of its own."""

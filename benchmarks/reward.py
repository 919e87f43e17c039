"""The reward of benchmarks/rl.py, for every trainer: cheap, and different within a group."""


def even(prompt: str, completion: str, row: dict) -> float:
    """The fraction of the completion's words that end in an even digit."""
    words = completion.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))

def digits(prompt, completion, row):
    return sum(c.isdigit() for c in completion) / 8 + completion.startswith(row["answer"][0])

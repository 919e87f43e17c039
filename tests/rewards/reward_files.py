"""A file of reward functions for the tests, as a user would write one, and what is left of processes."""

from __future__ import annotations

import pathlib

import psutil

FUNCTIONS = '''
import asyncio, ctypes, json, os, pathlib, re, subprocess, sys, threading, time
import neighbour

CLIENT = {}

def size(prompt, completion, row): return len(completion) + neighbour.ZERO
def shout(prompt, completion, row): print("printed"); return completion.isupper()
def messages(prompt, completion, row): return len(prompt)
def takes_from_row(prompt, completion, row): return row["nested"].pop("value")
def own_loop(prompt, completion, row): return asyncio.run(asyncio.sleep(0, 2.0))

def script(prompt, completion, row):
    """Does what the completion says."""
    what, _, argument = completion.partition(" ")
    if what == "give": return eval(argument)
    if what == "hang": time.sleep(1000)
    if what == "sleep": time.sleep(float(argument)); return 1.0
    if what == "hang_in_c": re.fullmatch("(a+)+b", "a" * 64)
    if what == "ignore_signals":
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT}); time.sleep(1000)
    if what == "exit": os._exit(7)
    if what == "segfault": ctypes.string_at(0)
    if what == "leave": sys.exit(0)
    if what == "raise": raise KeyError(argument)
    if what == "setsid": subprocess.Popen(["sleep", argument], start_new_session=True); time.sleep(1000)
    if what == "later": threading.Timer(0.05, os._exit, [9]).start(); return 1
    if what == "note": pathlib.Path(argument).open("a").write("x"); return 1
    if what == "busy":
        tries = pathlib.Path(argument); tries.open("a").write("x")
        if tries.stat().st_size < 3: raise ConnectionError("busy")
        return 1

async def async_script(prompt, completion, row):
    if completion == "same loop": return CLIENT.setdefault("loop", asyncio.get_running_loop()) is asyncio.get_running_loop()
    if completion == "stubborn":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if completion.startswith("sleep"): await asyncio.sleep(float(completion.split()[1])); return 1.0
    return script(prompt, completion, row)

class Judge:
    async def __call__(self, prompt, completion, row): return 3

judge = Judge()
number = 5
def parses(prompt, completion, row):
    return json.loads(completion)["score"]  # the line that a user can mend
def of_verl(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str == ground_truth)
async def of_verl_async(solution_str, extra_info): return 1.0
def of_trl(completions, value, **kwargs): return [len(c) + v for c, v in zip(completions, value)]
async def of_group(prompt, completions): return [c == max(completions) for c in completions]
def places(p, c, r): return 0.0
def more(completion, answer): return 0.0
def by_place(completion, /): return 0.0
from builtins import max
def wider(prompt, completion, row, temperature=1.0): return 0.5
'''


def write_functions(folder: pathlib.Path) -> str:
    """Path of the file; `script` and its like are in it."""
    (folder / "neighbour.py").write_text("ZERO = 0\n", encoding="utf-8")
    path = folder / "my_rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return str(path)


def processes_with(text: str) -> list[int]:
    """Processes of this machine, without zombies, with `text` as an argument of theirs."""
    found = psutil.process_iter(["cmdline", "status"])
    return [p.pid for p in found if p.info["status"] != psutil.STATUS_ZOMBIE and text in (p.info["cmdline"] or [])]

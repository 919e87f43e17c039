"""How records of commands are found: mrl's own by their modules, others by entry points."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
from click.testing import CliRunner

from mrl import cli
from mrl.config import command as commands
from mrl.config.dpo import DPOConfig
from mrl.config.load import from_dict, to_dict
from mrl.config.ppo import PPOConfig
from mrl.config.rm import RMConfig
from mrl.config.schema import SFTConfig
from mrl.config.serve import ServeConfig
from tests.config.test_load import BASE, PPO_BASE


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Installs packages that register commands: `site(name, entries, code)`."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, entries: str, code: str = "") -> None:
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[mrl.commands]\n{entries}\n")
        (tmp_path / f"{name}.py").write_text(code)
        commands.registered_commands.cache_clear()

    yield install
    commands.registered_commands.cache_clear()


def refusal(*words: str) -> str:
    done = CliRunner().invoke(cli.main, list(words))
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return done.stderr


def test_mrls_own_are_the_modules_of_its_folder():
    folder = pathlib.Path(cli.__file__).parent / "commands"
    assert commands.own_names() == sorted(path.stem for path in folder.glob("[a-z]*.py"))
    for command in commands.all_training():
        module, _, function = command.trainer.partition(":")
        assert function and importlib.util.find_spec(module) is not None
        assert commands.record(command.name) is command is commands.command_of(command.root)
    assert list(commands.roots().items()) == [
        ("sft", SFTConfig), ("ppo", PPOConfig), ("dpo", DPOConfig), ("serve", ServeConfig),
        ("rm", RMConfig),
    ]  # fmt: skip


def test_saved_data_is_of_the_command_whose_keys_are_nearest():
    sft, ppo = to_dict(from_dict(BASE)), to_dict(from_dict(PPO_BASE, PPOConfig))
    for name, data in (("sft", sft), ("ppo", ppo), ("sft", BASE), ("ppo", PPO_BASE)):
        assert commands.command_of_data(data).name == name
        older = {section: value for section, value in data.items() if section not in ("log", "rollout", "seed")}
        assert commands.command_of_data(older | {"dropped": {"since": 1}}).name == name


SECTIONS = ("output_dir", "model", "data", "train")


@pytest.mark.parametrize(
    "name, sections",
    [
        ("sft", SECTIONS),  # which unlearn has, too
        ("unlearn", (*SECTIONS, "forget")),
        ("unlearn", ("forget",)),
        ("ppo", ("output_dir", "actor", "data", "train")),
        ("ppo", ("actor", "algorithm", "rollout")),
        ("ppo", ("actor", "misspelt")),  # no command has all
        ("ppo", ("rollout", "misspelt")),
    ],
)
def test_a_yaml_is_of_the_command_that_has_its_sections(site, monkeypatch, name, sections):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent / "external"))
    site("unlearning", "unlearn = mrl_unlearn.record:COMMAND")
    assert commands.command_of_data({section: {} for section in sections}).name == name


def test_a_record_that_cannot_be_loaded_names_its_package(site):
    site("gone", "gone = gone_away:COMMAND")
    site("broken", "broken = broken:COMMAND", "1 / 0")
    says = "No module named 'gone_away'); mend or uninstall that package"
    assert refusal("gone") == f"mrl: mrl gone: cannot be imported from gone_away:COMMAND (ModuleNotFoundError: {says}\n"
    assert "mrl broken: cannot be imported from broken:COMMAND (ZeroDivisionError: division by zero)" in refusal(
        "broken"
    )


def test_what_a_package_breaks_is_its_own_command_alone(site):
    """No other is refused by it: not the list, the keys, the check of a config, and above all no resume."""
    site("broken", "broken = broken:COMMAND", "1 / 0")
    listed = CliRunner().invoke(cli.main, ["--help"])
    assert listed.exit_code == 0 and "cannot be imported from broken:COMMAND" in listed.stdout
    assert CliRunner().invoke(cli.main, ["config", "model.lora"]).exit_code == 0
    assert commands.command_of_data(to_dict(from_dict(BASE))).name == "sft"


def test_a_name_of_two_packages_is_refused(site):
    site("one", "twice = one:COMMAND")
    site("other", "twice = other:COMMAND")
    assert refusal("twice") == "mrl: mrl twice: is registered by 2 packages; uninstall all but one\n"


def test_mrls_own_are_not_replaced(site):
    site("mine", "sft = mine:COMMAND", "1 / 0")
    assert commands.record("sft").root is SFTConfig


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ppo"], "Missing argument 'CONFIG'; see mrl ppo --help"),
        (
            ["sft", "x", "--nproc", "two"],
            "Invalid value for '--nproc': 'two' is not a valid integer range; see mrl sft",
        ),
        (["--nproc", "2", "sft", "x"], "No such option '--nproc'; options go after the command's name; see mrl --help"),
        (
            ["sft", "x", "--set", "a=1"],
            "No such option '--set'; a key of the config is given as KEY=VALUE; see mrl sft --help",
        ),
        (["sft", "x", "--nprocs", "2"], "No such option '--nprocs'. Did you mean '--nproc'?; see mrl sft --help"),
        (["slurm", "submi"], "No such command 'submi'. Did you mean 'submit'?; see mrl slurm --help"),
        (["nothing"], "No such command 'nothing'; see mrl --help"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_line(words, says):
    told = CliRunner().invoke(cli.main, words, prog_name="mrl")
    assert (told.exit_code, told.stdout) == (2, "") and told.stderr.startswith(f"mrl: {says}"), told.stderr
    assert told.stderr.count("\n") == 1


def test_no_words_are_no_mistake():
    assert CliRunner().invoke(cli.main, []).output.startswith("Usage: ")

"""The mutants of sampling by other programs: new weights on their way to them, and fields of megatron-core."""

from __future__ import annotations

from tests.mutants.mutant import of as _of

LINKS = "rollout/test_links.py"
OF_SERVERS = "rollout/test_links_of_servers.py"
AHEAD = "trainers/rl/test_launched.py::test_"
RULE = f"{AHEAD}each_rollout_is_sampled_by_the_weights_of_the_rule"
LATER = f"{AHEAD}later_turns_keep_the_weights_of_the_first"
BROKE_OFF = f"{AHEAD}a_rollout_that_broke_off_is_sampled_by_the_newest_weights"

OF_ROLLOUTS = (
    *_of(
        "rollout/stops.py",
        "rollout/test_stops.py",
        ("while start > 0 and whole <= self._longest", "while start > 0 and whole < self._longest - 1"),
        ("skip_special_tokens=False", "skip_special_tokens=True"),
    ),
    *_of(
        "rollout/vllm_local.py",
        "rollout/test_vllm_parts.py::test_the_engine_is_made_asleep_and_takes_weights_before_its_cache",
        ("if not self._engine.reset_prefix_cache():", "if False:"),
    ),
    *_of(
        "engine/links.py",
        (LINKS, OF_SERVERS),
        ('self._bell.set(LEFT, "1")', 'self._store.set(LEFT, "1")'),
        ("when_broken=LET_BE", "when_broken=CLEAN_UP"),
    ),
    *_of(
        "rollout/handover.py",
        OF_SERVERS,
        ("            link.leave()\n", "            pass\n"),
        ("self.servers.map(lambda s: s.finish(version))\n                link.rest()", "self.servers.map(lambda s: s.finish(version))"),
        ("except (OSError, RuntimeError) as error:\n            raise ServerError(\n                f\"{KEY}: there", "except RuntimeError as error:\n            raise ServerError(\n                f\"{KEY}: there"),
    ),
    *_of(
        "rollout/cpu_packing.py",
        "rollout/test_cpu_packing.py",
        ("type(method).__mro__", "(type(method),)"),
        (' and weight.device.type == "cpu"', ""),
    ),
    *_of(
        "trainers/rl/launched.py",
        LATER,
        ("            sampler.hold()\n", ""),
    ),
    *_of(
        "trainers/rl/launched.py",
        RULE,
        ("collector.collect(prompts, launch.iteration * self._steps + 1, launch.made)", "collector.collect(prompts, launch.made + 1, launch.made)"),
    ),
    *_of(
        "trainers/rl/launched.py",
        BROKE_OFF,
        ("data = broken[0].position if broken else", "data = broken[0].position if False else"),
    ),
    *_of(
        "trainers/rl/launched.py",
        f"{AHEAD}no_prompt_is_lost_and_none_is_trained_twice[two_ahead]",
        ("        if self._closing:\n            return None\n", ""),
        ("launches[: launches.index(broken[0])] if broken else launches", "[one for one in launches if one not in broken]"),
    ),
    *_of(
        "trainers/rl/launched.py",
        f"{AHEAD}metrics_say_how_old_the_weights_are",
        ("launched.iteration - launched.made / self._steps", "launched.iteration - launched.made"),
    ),
    *_of(
        "trainers/signals.py",
        BROKE_OFF,
        ("time.monotonic() - self._first_s >= APART_S", "False"),
    ),
    *_of(
        "trainers/rl/trainer.py",
        f"{AHEAD}the_order_of_answers_changes_nothing[whole]",
        ("if self.launched is not None and self.launched.in_flight and due:", "if False:"),
    ),
    *_of(
        "trainers/rl/trainer.py",
        (f"{AHEAD}metrics_say_how_old_the_weights_are", f"{AHEAD}fewer_steps_end_with_an_evaluation_and_a_save"),
        ("            self.launched.drop()", "            pass"),
    ),
    *_of(
        "algorithms/recipes.py",
        f"{AHEAD}metrics_say_how_old_the_weights_are",
        ('parts["correction"] = "truncate"', "pass"),
    ),
    *_of(
        "rollout/fleet.py",
        (LATER, f"{AHEAD}no_prompt_is_lost_and_none_is_trained_twice[two_ahead]", f"{AHEAD}a_server_that_would_hold_requests_back_is_refused"),
        ("adapter = version if fleet.takes_adapters else None", "adapter = fleet.version if fleet.takes_adapters else None"),
        ("for name in (self.version, *(sampler.held", "for name in (None, *(sampler.held"),
    ),
    *_of(
        "rollout/fleet.py",
        "rollout/test_lost_servers.py",
        ("if made[1] in servers}", "if True}"),
        ("                client.http.abort_requests()\n", "                pass\n"),
    ),
    *_of(
        "trainers/rl/rollout_ranks.py",
        "trainers/rl/test_rollout_ranks.py",
        ("            self._engine.load_hf(path)\n", "            pass\n"),
        ("micro_batch=role.engine.micro_batch", "micro_batch=role.engine.micro_batch, parallel=role.engine.parallel"),
    ),
    *_of(
        "engine/collective.py",
        "trainers/rl/test_rollout_ranks.py::test_messages_name_ranks_by_their_number_among_all",
        ("{LAUNCHED_RANK: str(rank), ", "{"),
    ),
    *_of(
        "rollout/recorded.py",
        "rollout/test_samples.py",
        ("not in (None, int(match[1]) - 1)", "not in (None, int(match[1]))"),
    ),
    *_of(
        "algorithms/policy.py",
        "algorithms/test_policy.py",
        ("return mean * mean / mean_of_squares", "return mean / mean_of_squares"),
    ),
    *_of(
        "rollout/adapters.py",
        "rollout/test_adapters.py::test_adapters_that_requests_name_stay_and_nothing_is_paused",
        ("and name not in but:", "and False:"),
        ("else {name, *self._in_use()}", "else {name}"),
    ),
    *_of(
        "rollout/recorded.py",
        "rollout/test_kept.py",
        ("self._remove_others(made, self._ahead)", "self._remove_others(made, 2 * self._ahead)"),
        ("for iteration in range(ahead + 1):", "for iteration in range(ahead):"),
    ),
    *_of(
        "rollout/vllm.py",
        OF_SERVERS,
        ('elif any(".experts." in name for name in names):', "elif False:"),
    ),
    *_of(
        "trainers/rl/samplers.py",
        "rollout/test_vllm_parts.py::test_the_rest_of_the_memory_wakes_after_the_actor_was_put_away",
        ("seconds, self._seconds = self._seconds, 0.0", "seconds = self._seconds"),
        ("return seconds if self._beside else None", "return seconds"),
    ),
    *_of(
        "mcore_models/megatron_needs.py",
        "mcore_models/test_megatron_needs.py",
        ("dims.ep * dims.etp == 1", "dims.ep == 1"),
        ('way == "allgather" and dims.experts_span_replicas', 'way == "allgather" and False'),
    ),
)  # fmt: skip

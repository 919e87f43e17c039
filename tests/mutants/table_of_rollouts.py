"""The mutants of sampling by other programs: new weights on their way to them, and fields of megatron-core."""

from __future__ import annotations

from tests.mutants.mutant import of as _of

LINKS = "rollout/test_links.py"
OF_SERVERS = "rollout/test_links_of_servers.py"

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
        ("when_broken=CLEAN_UP", "when_broken=LET_BE"),
        ("if self._is_left():", "if False:"),
        ("                if time.monotonic() > until_s:", "                if time.monotonic() > until_s + 30:"),
        ("            os.close(held[1])\n", ""),
        ("fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
        ("        _remove_abandoned()\n", ""),
        ('_SHM, _OWN = pathlib.Path("/dev/shm"), "mrl-link"', '_SHM, _OWN = pathlib.Path("/dev/shm"), "mrl"'),
        ("        check(work)\n        return data", "        return data"),
    ),
    *_of(
        "rollout/handover.py",
        OF_SERVERS,
        ("            link.leave()\n", "            pass\n"),
        ("self._servers.map(lambda s: s.finish(version))\n                link.rest()", "self._servers.map(lambda s: s.finish(version))"),
        ("except (OSError, no_memory) as error:", "except no_memory as error:"),
    ),
    *_of(
        "rollout/cpu_packing.py",
        "rollout/test_cpu_packing.py",
        ("type(method).__mro__", "(type(method),)"),
        (' and weight.device.type == "cpu"', ""),
        ("        _pack_experts(layer)\n", ""),
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
        ("not MIN_VALUES[name] < value < math.inf", "not MIN_VALUES[name] < value"),
        ('if value in (None, False, "alltoall"):', "if value is None:"),
        ('and not (unknown and elsewhere != "local")', "and not unknown"),
        ("absent is not None and not unknown", "absent is not None"),
    ),
)  # fmt: skip

"""The mutants of `mrl serve`: a wrong loss, a promise that is kept twice or never, data that is not what was sent."""

from __future__ import annotations

from tests.mutants.mutant import of as _of

OF_SERVE = (
    *_of(
        "algorithms/sums.py",
        "algorithms/test_sums.py",
        ("return -_clip(_ratio(lp, fields), options).detach() * lp", "return -_clip(_ratio(lp, fields), options) * lp"),
        ("-torch.minimum(ratio * advantages, _clip(ratio, options)", "-torch.maximum(ratio * advantages, _clip(ratio, options)"),
        ('(options["beta"] / 2)', '(options["beta"])'),
    ),
    *_of(
        "serve/request_queue.py",
        "serve/test_ledger.py",
        ("            if number < made.next:", "            if number < 0:"),
        ("return self.next in self.waiting", "return bool(self.waiting)"),
        ("                        self._queues[queue] = made  # at the end\n", "                        self._queues = {queue: made, **self._queues}\n"),
        ("return self.done_at < now - KEPT_S", "return self.asked_at < now - KEPT_S"),
        ("self.fetched_at < now - FETCHED_S", "self.fetched_at < now"),
        ("self._check_room(0 if number == made.next else calls + 1)", "self._check_room(calls + 1)"),
        ("if self._closed or waiting > ", "if waiting > "),
    ),
    *_of(
        "serve/datums.py",
        "serve/test_training.py",
        ("labels=torch.cat(labels), loss_mask", "labels=joined, loss_mask"),
        ("width = 4 * (trailing[0] if trailing else 1)", "width = 4"),
        ("return {**known, **call.given}", "return {**call.given, **known}"),
    ),
    *_of(
        "serve/padded.py",
        ("serve/test_models.py::test_a_wider_adapter_acts_as_the_narrow_one", "serve/test_models.py::test_what_is_not_adapted_is_zero"),
        ("F.pad(b, (0, lacking))", "F.pad(b, (lacking, 0))"),
        ('"A")[:, : shape.rank]', '"A")[:, -shape.rank :]'),
        ("wanted = attention if is_attention(shape) else mlp", "wanted = mlp if is_attention(shape) else attention"),
    ),
    *_of(
        "serve/models.py",
        "serve/test_models.py",
        ("if one.kind in FAULTS]", "]"),
        ('            raise ServerFault("optim_step"', '            ServerFault("optim_step"'),
        ("            self._drop(ops.DropGradients(operation.model))\n", "            pass\n"),
    ),
    *_of(
        "serve/training.py",
        "serve/test_training.py",
        ("if value < least or value > most or (name.startswith", "if value < least or (name.startswith"),
        ("dataclasses.replace(saved.kind, seed=model.kind.seed) != model.kind", "saved.kind != model.kind"),
        ("if path in self.ledger.saved and not overwrite:", "if path in self.ledger.saved:"),
    ),
    *_of(
        "serve/sampling.py",
        "serve/test_sampling.py",
        ("room = self.served.limits.length - len(tokens)", "room = self.served.limits.length"),
        ("return stops, list(self.end_tokens)", "return stops, []"),
        ("messages.STOP if one.finished else messages.LENGTH", "messages.LENGTH if one.finished else messages.STOP"),
    ),
    *_of(
        "serve/openai.py",
        "serve/test_sampling.py",
        ("held = 0 if whole else max((len(stop) - 1 for stop in self.stop), default=0)", "held = 0"),
        ("if same.numel() and same.isfinite().all():", "if False:"),
        ("if stream and (echo or top is not None or top_of_prompt is not None):", "if False:"),
    ),
    *_of(
        "serve/ledger.py",
        "serve/test_ledger.py",
        ('file.write("\\n")\n        except', "pass\n        except"),
        ("if not _RUN.fullmatch(run) or part not in PARTS:", "if part not in PARTS:"),
        ("if saved.expires is not None and saved.expires <= now:", "if saved.expires is not None:"),
        ("            self.deleted.discard(self.folder_of(saved))\n", ""),
        ('self._write("finished", id=id)', "self.sessions[id] = ENDED"),
    ),
)  # fmt: skip

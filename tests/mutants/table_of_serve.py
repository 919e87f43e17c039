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
        ('penalty.masked_fill(fields["logprobs"] == 0, 0.0)', "penalty"),
        ("to_tokens(bounded(mean).exp(), lengths) * (lp - lp.detach()).exp()", "to_tokens(bounded(mean).exp(), lengths)"),
        ("sum_per_sequence(mask, lengths).clamp(min=1.0)", "sum_per_sequence(torch.ones_like(mask), lengths)"),
        ("return bounded(lp - fields", "return (lp - fields"),
        ("return each.sum(), ctx", "return each.mean(), ctx"),
    ),
    *_of(
        "serve/desk.py",
        "serve/test_desk.py",
        ("            if number < made.next:", "            if number < 0:"),
        ("return self.next in self.waiting", "return bool(self.waiting)"),
        ("self._turns.append(queue)\n                    taken", "self._turns.appendleft(queue)\n                    taken"),
        ("made.waiting = [*waiting, *made.waiting]", "made.waiting = [*waiting]"),
        ("if self._closed is not None or waiting + count > self.most_waiting:", "if waiting + count > self.most_waiting:"),
        ("self._lent.discard(promise.id)", "pass"),
        ("if len(ready) != 1 or not isinstance", "if not isinstance"),
        ("_Together) or not ready[0].more:", "_Together):"),
        ("made.more = made.more or more", "made.more = made.more"),
        ("            made.more = True\n", ""),
        ("began + GATHER_MOST_S - time", "began + 100 - time"),
        ("p.result is not None and p.done_at < before", "p.done_at < before"),
        ("taken = [self.waiting.pop(self.next - 1)]\n        self.pass_refused()", "taken = [self.waiting.pop(self.next - 1)]"),
        ("made.next = max(made.waiting) + 1", "made.next += 1"),
        ("if not isinstance(made, _Numbered) or made.ready() or not made.waiting:", "if not isinstance(made, _Numbered) or not made.waiting:"),
    ),
    *_of(
        "serve/datums.py",
        "serve/test_datums.py",
        ("labels=torch.cat(labels), loss_mask", "labels=joined, loss_mask"),
        ("width = 4 * (trailing[0] if trailing else 1)", "width = 4"),
        ("return {**known, **call.given}", "return {**call.given, **known}"),
        ("math.prod(shape) > room", "False"),
        ("room -= sum(", "room += sum("),
        ("np.add.at(dense, (np.repeat(np.arange(rows), np.diff(starts)), columns), values)", "dense[:, columns] = values"),
        ("outside = ids[(ids < 0) | (ids >= limits.vocab_size)]", "outside = ids[ids < 0]"),
        ('values.dtype.kind == "f" and not np.isfinite(values).all()', "False"),
    ),
    *_of(
        "serve/padded.py",
        "serve/test_padded.py",
        ('view(shape.out_features, shape.rank, experts)\n        found[shape.a_name] = torch.cat', 'view(shape.out_features, experts, shape.rank).transpose(1, 2)\n        found[shape.a_name] = torch.cat'),
        ("view(experts, rank, -1)[:, : shape.rank]", "view(experts, rank, -1)[:, -shape.rank :]"),
        ("wanted = attention if is_attention(shape) else mlp", "wanted = mlp if is_attention(shape) else attention"),
    ),
    *_of(
        "serve/models.py",
        "serve/test_models.py",
        ("if one.kind in FAULTS]", "]"),
        ("            raise OwnFault(", "            OwnFault("),
        ("        self.watched.add(asked.model)\n", ""),
        ("            self.watched.discard(name)\n", ""),
        ("self.keys.guards and asked.model not in", "asked.model not in"),
    ),
    *_of(
        "serve/ledger.py",
        "serve/test_ledger.py",
        ('file.write("\\n")\n        for', "pass\n        for"),
        ("if not _RUN.fullmatch(run) or part not in PARTS:", "if part not in PARTS:"),
        ("if saved.expires is not None and saved.expires <= now:", "if saved.expires is not None:"),
    ),
)  # fmt: skip

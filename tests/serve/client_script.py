"""What a client of any version does: it trains, saves, samples, scores and goes on. Run with the url and the model; prints JSON.

Versions before 0.33 return clients where later ones return futures of them.
"""

import json
import os
import sys

os.environ["TINKER_TELEMETRY"] = "0"

import tinker  # noqa: E402
from tinker import types  # noqa: E402


def made(client):
    """The client of a future, where there is one."""
    return client.result() if hasattr(client, "result") else client


def datum(ids, **fields):
    inputs = {"target_tokens": types.TensorData(data=ids[1:], dtype="int64", shape=[len(ids) - 1])}
    for name, values in fields.items():
        inputs[name] = types.TensorData(data=values, dtype="float32", shape=[len(values)])
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def main(url, model):
    service = tinker.ServiceClient(base_url=url, api_key="tml-tests")
    client, found = made(service.create_lora_training_client(base_model=model, rank=4, seed=3)), []
    adam, prompt = types.AdamParams(learning_rate=1e-2), types.ModelInput.from_ints([5, 6, 7, 8])

    def step(client, seed):
        data = [datum([5 + seed, 6, 7, 8], weights=[1.0, 0.5, -0.25]), datum([9, 10, 11 + seed], weights=[1.0, 1.0])]
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(adam)
        found.append([passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]])

    step(client, 0)
    path = client.save_state("half").result().path
    step(client, 1)
    sampler = made(client.save_weights_and_get_sampling_client())
    drawn = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=6, seed=1)).result().sequences
    found += [[list(one.tokens), list(one.logprobs)] for one in drawn]
    found.append(sampler.compute_logprobs(prompt).result())
    step(made(service.create_training_client_from_state_with_optimizer(path)), 1)
    print(json.dumps({"version": tinker.__version__, "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])

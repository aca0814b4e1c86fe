"""Do two runs of the same training agree?"""

import statistics

GRADIENT_LIMIT = {"fp32": 1e-5, "fp64": 1e-9}  # norm of the difference over the norm
LOSS_LIMIT = {"fp32": 1e-4, "fp64": 1e-9}  # relative


def speed(record):
    """Tokens per second; the first step, which warms up, left out where there is another."""
    tokens, seconds = record["tokens"], record["seconds"]
    skip = 1 if len(tokens) > 1 else 0
    return statistics.median(t / s for t, s in zip(tokens[skip:], seconds[skip:]))


def gradient_differences(ours, reference):
    """Descending: (difference, parameter)."""
    found = []
    for name, expected in reference.items():
        norm, difference = expected.norm().item(), (ours[name] - expected).norm().item()
        found.append((difference / norm if norm else difference, name))
    return sorted(found, reverse=True)


def report(several, one, ranks, dtype):
    """Prints both runs side by side; True if they agree within the limits of the type."""
    (record, gradients), (record1, gradients1) = several, one
    losses = list(zip(record["losses"], record1["losses"]))
    print(f"step  loss, {ranks:2} ranks  loss, 1 rank  relative difference")
    relative = [abs(a - b) / abs(b) for a, b in losses]
    for step, ((a, b), difference) in enumerate(zip(losses, relative), 1):
        print(f"{step:4}  {a:14.9f}  {b:12.9f}  {difference:.1e}")
    differences = gradient_differences(gradients, gradients1)
    print("\nfirst-step gradient             |difference| / |gradient|, the ten largest")
    for difference, name in differences[:10]:
        print(f"  {name:30}  {difference:.1e}")
    print(f"\ntokens/s: {speed(record):.0f} on {ranks} ranks, {speed(record1):.0f} on 1 (the same processor)")
    checks = [
        check("loss", max(relative), LOSS_LIMIT[dtype]),
        check(f"gradient of {len(differences)} parameters", differences[0][0], GRADIENT_LIMIT[dtype]),
    ]
    return all(checks)


def check(what, largest, limit):
    good = largest <= limit  # False for NaN
    print(f"largest relative difference, {what}: {largest:.1e}, limit {limit:.0e}: {'ok' if good else 'FAILED'}")
    return good

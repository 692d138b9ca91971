"""`python -m bench [WHAT…] [--runs N] [--seconds S]`: all but `mixed` by default."""

import argparse

from bench import abuse, backlog, embeddings, engine, engine_share, mixed, pipeline, quotas

MEASUREMENTS = {
    "pipeline": pipeline.measure,
    "engine_share": engine_share.measure,
    "embeddings": embeddings.measure,
    "engine": engine.measure,
    "mixed": mixed.measure,
    "backlog": backlog.measure,
    "quotas": quotas.measure,
    "idle": abuse.idle,
    "unread": abuse.unread,
    "cancels": abuse.cancels,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("what", nargs="*", help=" or ".join(MEASUREMENTS), metavar="WHAT")
    parser.add_argument("--runs", type=int, default=3, help="runs to take the median of")
    parser.add_argument("--seconds", type=float, default=20, help="length of a loaded run")
    words = parser.parse_args()
    unknown = set(words.what) - MEASUREMENTS.keys()
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}, only {', '.join(MEASUREMENTS)}")
    for name in words.what or [name for name in MEASUREMENTS if name != "mixed"]:
        MEASUREMENTS[name](words.runs, words.seconds)


if __name__ == "__main__":
    main()

"""Odd models through planning: how many get a plan, how many a sentence, and whether cuts answer right.

scripts/python -m benchmarks.odd_plans --models 117 --seed 0
"""

import collections
import traceback

from benchmarks.results import make_parser
from tests.offload.odd_models import odd_models
from tests.offload.test_odd_models import check_answers, plan_model

from edgekit_runtime.errors import EdgekitError


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=int, default=117)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    for name, content in odd_models(arguments.seed, arguments.models):
        try:
            result, splits = plan_model(name, content)
            counts["exact ways compared"] += check_answers(name, content, splits)
            outcome = "plan with cuts" if any(way.kind == "cut" for way in result.candidates) else "plan"
        except EdgekitError as cause:
            outcome = "sentence"
            print(f"{name}: {cause}", flush=True)
        except Exception:  # a traceback is what it looks for
            outcome = "traceback"
            print(f"{name}: {traceback.format_exc()}", flush=True)
        counts[outcome] += 1
    print(dict(counts))


if __name__ == "__main__":
    main()

"""Build SGLang's own request classes from the front's requests: a process of SGLang's environment, without a server.

Each line of standard input is [class, body]. Fails at the first body that SGLang's HTTP server would not accept.
"""

import json
import sys

from pydantic import TypeAdapter
from sglang.srt.entrypoints.api_contract import generate_contract_error
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams


def main() -> None:
    """Check standard input, and print the number of lines."""
    count = 0
    for line in sys.stdin:
        name, body = json.loads(line)
        request = TypeAdapter(getattr(io_struct, name)).validate_python(body)
        for field, value in body.items():
            assert getattr(request, field) == value, (name, field)
        if name == "GenerateReqInput":
            assert (problem := generate_contract_error(body)) is None, problem
            request.normalize_batch_and_arguments()
            SamplingParams(**request.sampling_params).verify(1000)
        count += 1
    print(count)


if __name__ == "__main__":
    main()

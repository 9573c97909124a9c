"""A helper's process: computes the gradients of samples, and sleeps in the socket in between."""

import msgspec

from tailrace.trainer.flat import follow, gather_gradients, num_elements
from tailrace.trainer.tally import Tally
from tailrace.workers.channel import WorkerChannel
from tailrace.workers.child import begin, config_errors_sent
from tailrace.workers.helper import mapped, passes_of
from tailrace.workers.messages import Compute, Computed, HelperJob, Ready


def main() -> None:
    end, job = begin(HelperJob)
    channel = WorkerChannel(end, msgspec.msgpack.Decoder(Compute))
    with config_errors_sent(channel):
        passes = passes_of(job.trainer)
    parameters = list(passes.policy.parameters().values())
    follow(parameters, mapped(job.weights, num_elements(parameters)))
    gather_gradients(parameters, mapped(job.gradient, num_elements(parameters)))
    channel.send(Ready())
    for compute in channel:
        tally = Tally(passes.policy.device)
        for sums in passes.run(compute.samples):
            tally.add(sums)
        channel.send(Computed(tally.figures()))


if __name__ == "__main__":
    main()

"""A serving engine without a model: the scheduler fills each step, the checking runner proves every value it reads."""

from kvpool import KVCacheManager, Request
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler, SchedulerConfig

cache = KVCacheManager(num_blocks=12, block_size=4)
scheduler = Scheduler(cache, SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4))
runner = CheckingRunner(cache)
engine = Engine(scheduler, runner)

instructions = list(range(100, 112))
for number in range(3):
    scheduler.add(Request(f"r{number}", [*instructions, 10 * number, 10 * number + 1], max_tokens=10))

step = 0
while scheduler.has_work:
    output = engine.step()
    step += 1
    running = ", ".join(request.request_id for request in scheduler.running)
    ended = "".join(f"  {request.request_id} ended" for request in output.ended)
    print(
        f"step {step:2}: {len(output.requests)} in the batch, {cache.num_free_blocks:2} blocks free, [{running}]{ended}"
    )

cache.check()
print(f"{scheduler.num_preemptions} preemptions, {runner.num_values_checked:,} values read back, none foreign or stale")
print(f"first admissions hit {cache.stats.num_hit_tokens} of {cache.stats.num_queried_tokens} prompt tokens")

"""How large a cache? One generated workload through caches of several sizes, side by side in processes."""

from concurrent.futures import ProcessPoolExecutor

from kvpool.replay.settings import ReplaySettings
from kvpool.replay.simulator import Job, replay_many
from kvpool.replay.workload import Workload

SIZES = (500, 1_000, 2_000, 4_000, 8_000)


def main() -> None:
    workload = Workload("chat", seed=1, num_requests=400)
    jobs = [Job(workload, ReplaySettings(num_blocks=size)) for size in SIZES]
    print("blocks  hit tokens / prompt tokens   rate   infinite cache")
    with ProcessPoolExecutor() as executor:
        for report in replay_many(jobs, executor):
            hits = report.all
            print(
                f"{report.num_blocks:6,}  {hits.hit_tokens:10,} / {hits.total_tokens:13,}  {hits.token_hit_rate:6.1%}"
                f"   {hits.ideal_token_hit_rate:6.1%}"
            )


if __name__ == "__main__":
    main()

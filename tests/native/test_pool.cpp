// The pool of the core alone: what the Python suites cannot see, and long random histories for the sanitizers.
#include <map>
#include <random>
#include <set>

#include "dependents.hpp"
#include "harness.hpp"
#include "pool.hpp"

namespace kvpool {

// Plants what `check` must find.
struct Spoiler {
  static FreeQueue& queue(Pool& pool) { return pool.queue_; }
  static NameTable& table(Pool& pool) { return pool.table_; }
  static uint32_t& num_cached(Pool& pool) { return pool.num_cached_; }
};

}  // namespace kvpool

using namespace kvpool;

namespace {

Name name_of(uint32_t number) {
  Name name{};
  std::memcpy(name.bytes, &number, 4);
  return name;
}

std::vector<int32_t> taken(Pool& pool, size_t count) {
  std::vector<int32_t> ids(count);
  REQUIRE(pool.allocate(count, ids.data(), nullptr));
  return ids;
}

Ids span(const std::vector<int32_t>& ids) { return {ids.data(), ids.size()}; }

void commit(Pool& pool, const std::vector<int32_t>& ids, const std::vector<Name>& names, unsigned group = 0) {
  pool.commit(span(ids), {names.data(), names.size()}, group, nullptr, {});
}

std::vector<int32_t> order(const Pool& pool) {
  std::vector<int32_t> ids;
  for (uint32_t id = pool.queue().next(0); id; id = pool.queue().next(id)) ids.push_back(static_cast<int32_t>(id));
  return ids;
}

}  // namespace

TEST(a_new_pool_is_in_order) {
  for (const uint32_t size : {2u, 3u, 1000u}) {
    Pool pool(size, 1, true);
    pool.check();
    const std::vector<int32_t> ids = order(pool);
    REQUIRE(ids.size() == size - 1 && ids.front() == 1 && ids.back() == static_cast<int32_t>(size - 1));
  }
}

TEST(a_refused_call_changes_nothing) {
  Pool pool(6, 1, false);
  const std::vector<int32_t> ids = taken(pool, 3);
  commit(pool, {1}, {name_of(1)});
  const std::vector<Name> two = {name_of(2), name_of(3)};
  REQUIRE(thrown<Broken>([&] { commit(pool, {2, 2}, two); }) == "invariant 4: block 2 already has a name");
  REQUIRE(thrown<Broken>([&] { commit(pool, {2, 1}, two); }) == "invariant 4: block 1 already has a name");
  REQUIRE(thrown<Broken>([&] { commit(pool, {2, 5}, two); }) ==
          "invariant 3: block 5 is committed, but nobody holds it");
  REQUIRE(!pool.name(2) && pool.holders(2) == 1);
  REQUIRE(pool.free(span({1, 2, 3, 2}), Runs::kOne) == 3);
  REQUIRE(pool.free(span({1, -4}), Runs::kOne) == 1 && pool.free(span({1, 99}), Runs::kEach) == 1);
  REQUIRE(pool.holders(1) == 1 && pool.holders(2) == 1 && pool.num_free() == 2);
  REQUIRE(!thrown<Refused>([&] { pool.touch(span({1, 4})); }).empty());
  REQUIRE(pool.holders(1) == 1);
  pool.check();
}

TEST(ids_from_outside_are_looked_at) {
  Pool pool(6, 1, true);
  for (const int32_t id : {-1, 6, 2147483647, -2147483647 - 1}) {
    const std::vector<int32_t> ids = {id};
    const std::vector<Name> names = {name_of(1)};
    int num_refused = 0;
    const auto refuses = [&](auto call) {
      try {
        call();
      } catch (const NoSuchBlock& error) {
        num_refused += error.id == id;
      }
    };
    refuses([&] { pool.touch(span(ids)); });
    refuses([&] { pool.keep(span(ids)); });
    refuses([&] { pool.num_idle(span(ids)); });
    refuses([&] { pool.carry(span(ids), {names.data(), 1}, 0); });
    refuses([&] { commit(pool, ids, names); });
    refuses([&] { pool.commit({}, {}, 0, nullptr, span(ids)); });
    REQUIRE(num_refused == 6);
  }
  pool.check();
}

TEST(names_that_share_a_place_are_told_apart) {
  // A table of few buckets, so that entries are sent on; and blocks come and go for long.
  std::mt19937 random(3);
  Pool pool(200, 3, false);
  std::map<std::pair<uint32_t, unsigned>, std::vector<int32_t>> known;
  std::map<int32_t, std::pair<uint32_t, unsigned>> own;
  for (int turn = 0; turn < 20000; turn++) {
    const std::vector<int32_t> ids = taken(pool, 1);
    if (const auto had = own.find(ids[0]); had != own.end()) {
      auto& blocks = known[had->second];
      blocks.erase(std::find(blocks.begin(), blocks.end(), ids[0]));
    }
    const std::pair<uint32_t, unsigned> key(random() % 150, random() % 3);
    commit(pool, ids, {name_of(key.first)}, key.second);
    known[key].push_back(ids[0]);
    own[ids[0]] = key;
    pool.free(span(ids), Runs::kOne);
    const std::pair<uint32_t, unsigned> asked(random() % 150, random() % 3);
    const auto& blocks = known[asked];
    const int32_t found = static_cast<int32_t>(pool.find(name_of(asked.first), asked.second));
    REQUIRE(found == (blocks.empty() ? 0 : blocks.front()));
    if (turn % 500 == 0) pool.check();
  }
  REQUIRE(pool.num_evictions() > 19000);
}

TEST(a_table_without_entries_sent_nothing_on) {
  std::mt19937 random(4);
  Pool pool(5000, 1, false);
  for (int turn = 0; turn < 30; turn++) {
    const std::vector<int32_t> ids = taken(pool, 4999);
    std::vector<Name> names;
    for (size_t i = 0; i < ids.size(); i++) names.push_back(name_of(random()));
    commit(pool, ids, names);
    pool.free(span(ids), Runs::kOne);
  }
  REQUIRE(Spoiler::table(pool).num_sent_on() > 0);
  taken(pool, 4999);
  REQUIRE(Spoiler::table(pool).size() == 0 && Spoiler::table(pool).num_sent_on() == 0);
  pool.check();
}

TEST(check_finds_what_is_planted) {
  const std::pair<const char*, std::function<void(Pool&)>> faults[] = {
      {"invariant 2: a link is one-way", [](Pool& pool) { Spoiler::queue(pool)[7].before += 1; }},
      {"invariant 2: block 7", [](Pool& pool) { Spoiler::queue(pool)[7].marks |= kHeld; }},
      {"invariant 2: block 3", [](Pool& pool) { Spoiler::queue(pool)[3].marks &= ~kHeld; }},
      {"invariant 1: block 3 has 0 holders", [](Pool& pool) { Spoiler::queue(pool)[3].before = 0; }},
      {"invariant 1: 3 blocks are counted as cached, 2 are", [](Pool& pool) { Spoiler::num_cached(pool)++; }},
      {"invariant 3: the index and the blocks' names differ", [](Pool& pool) { Spoiler::table(pool).clear(); }},
      {"invariant 3: the index and the blocks' names differ", [](Pool& pool) { Spoiler::queue(pool)[1].home ^= 1; }},
      {"invariant 3: the index and the blocks' names differ", [](Pool& pool) { Spoiler::queue(pool)[4].marks &= ~kCopy; }},
      {"invariant 3: the index and the blocks' names differ",
       [](Pool& pool) { Spoiler::table(pool).add(secrets().fold(name_of(99)), 9); }},
      {"invariant 5: the null block is held", [](Pool& pool) { Spoiler::queue(pool)[0].marks |= kHeld; }},
      {"invariant 5: the null block has a name", [](Pool& pool) { Spoiler::queue(pool)[0].marks |= kNamed; }},
  };
  for (const auto& fault : faults) {
    Pool pool(11, 2, false);
    const std::vector<int32_t> first = taken(pool, 2);
    commit(pool, first, {name_of(1), name_of(2)});
    pool.free(span({2, 1}), Runs::kOne);
    const std::vector<int32_t> held = taken(pool, 2);
    commit(pool, held, {name_of(3), name_of(3)});
    pool.check();
    fault.second(pool);
    const std::string found = thrown<Broken>([&] { pool.check(); });
    if (found.find(fault.first) != 0) std::printf("%s, not %s\n", found.c_str(), fault.first);
    REQUIRE(found.find(fault.first) == 0);
  }
}

TEST(what_depends_on_bad_content) {
  Pool pool(8, 1, false);
  const std::vector<int32_t> ids = taken(pool, 4);
  const std::vector<Name> names = {name_of(1), name_of(2), name_of(3), name_of(4)};
  const uint64_t one = secrets().fold(names[0]), two = secrets().fold(names[1]);
  const Parent parents[] = {{Parent::kNone, 0}, {Parent::kPlain, one}, {Parent::kPlain, two}, {Parent::kPlain, 12345}};
  pool.commit(span(ids), {names.data(), 4}, 0, parents, {});
  const std::vector<Tie> ties;
  Dependents known(pool, ties);
  known.add(two, 1);
  REQUIRE((known.blocks() == std::vector<uint32_t>{2, 3}));
  Dependents all(pool, ties);
  all.add_lost();
  all.add(two, 1);
  REQUIRE((all.blocks() == std::vector<uint32_t>{2, 3, 4}));
  pool.forget(all.blocks(), nullptr);
  REQUIRE(pool.find(names[0], 0) == 1 && !pool.find(names[1], 0) && pool.holders(2) == 1);
  pool.check();
}

TEST(a_large_pool_costs_nothing_until_it_is_used) {
  Pool pool(50000000, 1, false);
  const std::vector<int32_t> ids = taken(pool, 3);
  REQUIRE((ids == std::vector<int32_t>{1, 2, 3}) && pool.num_free() == 49999996);
  REQUIRE(pool.bytes() <= 64ull * 50000000);
}

TEST(recent_names_are_a_window) {
  RecentNames recent;
  const auto key = [](uint64_t number) { return number * 0x9e3779b97f4a7c15u; };
  for (uint64_t number = 0; number < 100000; number++) {
    recent.add(key(number));
    recent.turn();
    REQUIRE(recent.contains(key(number)));
    if (number >= RecentNames::kLimit) REQUIRE(recent.contains(key(number - RecentNames::kLimit + 1)));
    if (number >= 2 * RecentNames::kLimit) REQUIRE(!recent.contains(key(number - 2 * RecentNames::kLimit)));
  }
}

int main() { return run_all(); }

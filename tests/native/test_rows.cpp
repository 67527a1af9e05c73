// Rows of a decode batch beside a plain walk over single requests: the same pool after every step, for the sanitizers.
#include <algorithm>
#include <random>

#include "harness.hpp"
#include "rows.hpp"

using namespace kvpool;

namespace {

constexpr uint32_t kSize = 4;

// What a row is, told without rows: one vector for each thing.
struct Plain {
  std::vector<int64_t> tokens;
  std::vector<std::vector<int32_t>> tables;
  std::vector<uint32_t> held;
  std::vector<Name> names;
};

Layout layout_of(std::vector<Window> windows, std::vector<unsigned> window_of, bool is_ranked) {
  Layout layout;
  layout.block_size = kSize;
  layout.keeps_last_border = is_ranked;
  layout.windows = std::move(windows);
  layout.window_of = std::move(window_of);
  layout.lets_go_after.assign(kSize + 1, 1);
  for (unsigned group = 0; group < layout.window_of.size(); group++)
    layout.published.push_back({group, is_ranked && layout.window_of[group] != kKeepsAll});
  return layout;
}

Tail tail_of(std::vector<int64_t> tokens, const Name& parent) {
  Tail tail;
  tail.tokens = std::move(tokens);
  tail.tokens.reserve(kSize);
  tail.parent = parent;
  tail.plain_from = kSize;
  return tail;
}

// One side has rows, the other does for each request what a step says.
class Walk {
 public:
  Walk(Layout layout, bool is_ranked, uint32_t seed)
      : layout_(layout), pool_(60, layout.num_groups(), is_ranked), other_(60, layout.num_groups(), is_ranked),
        rows_(pool_, layout), random_(seed) {}

  void run(int num_calls) {
    for (int i = 0; i < num_calls; i++) {
      switch (below(8)) {
        case 0: add(); break;
        case 1: leave(); break;
        case 2: serve(); break;
        default: step();
      }
      compare();
    }
  }

  size_t num_unserved = 0, num_full = 0;

 private:
  uint32_t below(uint32_t limit) { return random_() % limit; }

  bool allocate(Plain& plain) {
    std::vector<int32_t> ids(layout_.num_groups());
    if (!other_.allocate(ids.size(), ids.data(), nullptr)) return false;
    for (size_t group = 0; group < ids.size(); group++) plain.tables[group].push_back(ids[group]);
    return true;
  }

  // A first block, committed, of a few contents; and a token behind it.
  void add() {
    if (rows_.size() == 9) return;
    Plain plain;
    plain.tables.resize(layout_.num_groups());
    plain.held.assign(layout_.windows.size(), 0);
    std::vector<int32_t> ids(layout_.num_groups());
    if (!pool_.allocate(ids.size(), ids.data(), nullptr)) return;
    REQUIRE(allocate(plain));
    const int64_t token = below(2);
    plain.tokens.assign(kSize, token);
    Name name{};
    name.bytes[0] = static_cast<uint8_t>(token + 1);
    plain.names.push_back(name);
    for (const Published& published : layout_.published) {
      const Ids own{&ids[published.group], 1};
      pool_.commit(own, {&name, 1}, published.group, nullptr, {});
      other_.commit(own, {&name, 1}, published.group, nullptr, {});
    }
    plain.tokens.push_back(token);
    rows_.add(kSize + 1, INT64_MAX, ids.data(), 1, plain.held.data());
    rows_.follow(rows_.size() - 1, tail_of({token}, name));
    plains_.push_back(plain);
  }

  void leave() {
    std::vector<uint8_t> is_gone(rows_.size());
    for (uint8_t& gone : is_gone) gone = below(4) == 0;
    for (size_t at = rows_.size(); at--;) {
      if (!is_gone[at]) continue;
      std::vector<int32_t> ids;
      for (const auto& table : plains_[at].tables) {
        std::copy_if(table.rbegin(), table.rend(), std::back_inserter(ids), [](int32_t id) { return id != 0; });
        ids.push_back(0);
      }
      REQUIRE(pool_.free({ids.data(), ids.size()}, Runs::kParted) == ids.size());
      REQUIRE(other_.free({ids.data(), ids.size()}, Runs::kParted) == ids.size());
      plains_.erase(plains_.begin() + static_cast<long>(at));
    }
    rows_.remove(is_gone);
  }

  void serve() {
    rows_.serve(below(2), outcome_);
    for (Plain& plain : plains_)
      if (plain.tables[0].size() * kSize < plain.tokens.size()) grow(plain);
  }

  void step() {
    if (!rows_.unserved().empty()) return serve();
    std::vector<int64_t> tokens(rows_.size());
    for (int64_t& token : tokens) token = below(2);
    REQUIRE(rows_.step(tokens.data(), false, below(2), outcome_));
    for (const Published& published : layout_.published)
      for (Plain& plain : plains_)
        if (plain.tokens.size() % kSize == 0) publish(plain, published);
    for (size_t at = 0; at < plains_.size(); at++) plains_[at].tokens.push_back(tokens[at]);
    for (Plain& plain : plains_) grow(plain);
    num_unserved += rows_.unserved().size();
  }

  void publish(Plain& plain, const Published& published) {
    const size_t last = plain.tokens.size() / kSize - 1;
    if (plain.names.size() == last) {
      std::vector<uint32_t> tokens(plain.tokens.end() - kSize, plain.tokens.end());
      Name name;
      BlockMessages(kSize, kPortableSha).names(plain.names.back().bytes, tokens.data(), 1, nullptr, name.bytes);
      plain.names.push_back(name);
      num_full++;
    }
    const Parent parent{Parent::kPlain, secrets().fold(plain.names[last - 1])};
    const Ids ids{&plain.tables[published.group][last], 1};
    other_.commit(ids, {&plain.names[last], 1}, published.group, &parent, published.is_spare ? ids : Ids{});
  }

  void grow(Plain& plain) {
    int64_t computed = static_cast<int64_t>(plain.tokens.size()) - 1;
    if (layout_.keeps_last_border) computed -= computed % kSize;
    std::vector<int32_t> dead;
    for (size_t group = 0; group < plain.tables.size(); group++) {
      if (layout_.window_of[group] == kKeepsAll) continue;
      const Window& window = layout_.windows[layout_.window_of[group]];
      for (int64_t at = std::max<int64_t>(computed - window.num_tokens + 1, 0) / kSize; at-- > window.num_sink_blocks;) {
        int32_t& id = plain.tables[group][static_cast<size_t>(at)];
        if (id) dead.push_back(id);
        id = 0;
      }
      dead.push_back(0);
    }
    REQUIRE(other_.free({dead.data(), dead.size()}, Runs::kParted) == dead.size());
    if (plain.tables[0].size() * kSize < plain.tokens.size()) allocate(plain);
  }

  void compare() {
    pool_.check();
    REQUIRE(rows_.size() == plains_.size() && pool_.num_free() == other_.num_free());
    REQUIRE(pool_.num_cached() == other_.num_cached() && pool_.num_evictions() == other_.num_evictions());
    for (uint32_t id = 0, other = 0;;) {
      id = pool_.queue().next(id), other = other_.queue().next(other);
      REQUIRE(id == other);
      if (!id) break;
    }
    for (uint32_t id = 1; id < pool_.num_blocks(); id++) {
      REQUIRE(pool_.holders(id) == other_.holders(id) && !pool_.name(id) == !other_.name(id));
      REQUIRE(!pool_.name(id) || (*pool_.name(id) == *other_.name(id) && pool_.group(id) == other_.group(id)));
    }
    std::vector<int64_t> slots(rows_.size() * layout_.num_groups());
    rows_.slots(slots.data());
    for (size_t at = 0; at < rows_.size(); at++) compare(at, slots);
  }

  void compare(size_t at, const std::vector<int64_t>& slots) {
    const Plain& plain = plains_[at];
    const size_t last = plain.tokens.size() - 1;
    REQUIRE(rows_.length(at) == static_cast<int64_t>(plain.tokens.size()));
    REQUIRE(std::equal(rows_.recent(at).rbegin(), rows_.recent(at).rbegin() + rows_.fill(at), plain.tokens.rbegin()));
    for (unsigned group = 0; group < layout_.num_groups(); group++) {
      const std::vector<int32_t>& table = plain.tables[group];
      const int32_t* ids = rows_.blocks().row(group, at);
      REQUIRE(rows_[at].num_blocks == table.size() && std::equal(table.begin(), table.end(), ids));
      REQUIRE(std::all_of(ids + table.size(), ids + rows_.blocks().columns(), [](int32_t id) { return id == 0; }));
      const int64_t block = last / kSize < table.size() ? table[last / kSize] : 0;
      REQUIRE(slots[group * rows_.size() + at] == block * kSize + static_cast<int64_t>(last % kSize));
    }
    if (below(4) == 0) rows_.tell(at);
  }

  const Layout layout_;
  Pool pool_, other_;
  Rows rows_;
  std::vector<Plain> plains_;
  Outcome outcome_;
  std::mt19937 random_;
};

}  // namespace

TEST(rows_do_what_a_step_does_for_each_request) {
  const std::vector<std::pair<std::vector<Window>, std::vector<unsigned>>> kinds = {
      {{}, {kKeepsAll}},
      {{}, {kKeepsAll, kKeepsAll}},
      {{{6, 0}}, {kKeepsAll, 0, 0}},
      {{{9, 2}, {1, 0}}, {1, kKeepsAll, 0}},
  };
  size_t num_unserved = 0, num_full = 0;
  for (const auto& kind : kinds) {
    for (uint32_t seed = 0; seed < 12; seed++) {
      const bool is_ranked = seed % 2 && !kind.first.empty();
      Walk walk(layout_of(kind.first, kind.second, is_ranked), is_ranked, seed);
      walk.run(400);
      num_unserved += walk.num_unserved, num_full += walk.num_full;
    }
  }
  REQUIRE(num_unserved > 100 && num_full > 1000);
}

TEST(memory_that_is_read_outlives_its_owner) {
  BlockMatrix matrix(2);
  matrix.row(1, 3)[2] = 7;
  const std::shared_ptr<void> kept = matrix.keeper();
  const int32_t* old = matrix.row(1, 3);
  matrix.reserve(40, 20, 4);
  REQUIRE(matrix.row(1, 3)[2] == 7 && matrix.row(1, 3) != old && old[2] == 7);
}

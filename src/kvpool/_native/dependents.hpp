// What was computed on top of bad content.
#pragma once
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "pool.hpp"

namespace kvpool {

// One thing that a block depends on and that the pool does not note itself; see `Lineage` in kvpool.core.block_pool.
struct Tie {
  enum Kind : int { kBorder, kInside, kWhole } kind;
  uint32_t block;
  uint64_t folded;  // the name it is tied to
  int64_t num_tokens;
};

// Names are told apart by their folds: two that are mistaken for each other (one pair in 2^64) withdraw more.
class Dependents {
 public:
  static constexpr int64_t kAll = 2147483647;  // the most tokens that can be bad: all of them

  Dependents(const Pool& pool, const std::vector<Tie>& ties) : pool_(pool), ties_(ties) {
    for (uint32_t id = 1; id < pool.num_blocks(); id++)
      if (pool.queue_[id].has(kParent)) behind_[pool.parents_[id]].push_back({fold(id), kAll});
    for (const Tie& tie : ties)
      (tie.kind == Tie::kWhole ? parts_ : behind_)[tie.folded].push_back({fold(tie.block), tie.num_tokens});
  }

  // The names whose border nobody carries any more: all of what bears them counts as bad.
  void add_lost() {
    std::unordered_set<uint64_t> carried;
    for (uint32_t id = 1; id < pool_.num_blocks(); id++)
      if (pool_.name(id)) carried.insert(fold(id));
    for (uint32_t id = 1; id < pool_.num_blocks(); id++)
      if (pool_.queue_[id].has(kParent) && !carried.count(pool_.parents_[id])) num_bad_[fold(id)] = kAll;
    for (const Tie& tie : ties_)
      if (tie.kind == Tie::kBorder && !carried.count(tie.folded)) num_bad_[fold(tie.block)] = kAll;
  }

  void add(uint64_t folded, int64_t num_tokens) { num_bad_[folded] = num_tokens; }

  // The blocks that bear one of the names, or depend on what does; rising.
  std::vector<uint32_t> blocks() {
    spread();
    std::vector<uint32_t> found;
    for (uint32_t id = 1; id < pool_.num_blocks(); id++)
      if (pool_.name(id) && num_bad_.count(fold(id))) found.push_back(id);
    return found;
  }

 private:
  struct Link {
    uint64_t folded;
    int64_t num_tokens;
  };
  using Links = std::unordered_map<uint64_t, std::vector<Link>>;

  uint64_t fold(uint32_t id) const { return secrets().fold(pool_.names_[id]); }

  void spread() {
    std::vector<uint64_t> reached;
    for (const auto& bad : num_bad_) reached.push_back(bad.first);
    const auto reach = [&](uint64_t folded, int64_t count) {
      const auto known = num_bad_.find(folded);
      if (count <= (known == num_bad_.end() ? 0 : known->second)) return;
      num_bad_[folded] = count;
      reached.push_back(folded);
    };
    while (!reached.empty()) {
      const uint64_t folded = reached.back();
      reached.pop_back();
      const int64_t count = num_bad_[folded];
      if (const auto links = behind_.find(folded); links != behind_.end())
        for (const Link& link : links->second) reach(link.folded, std::min(count + link.num_tokens, kAll));
      if (const auto links = parts_.find(folded); links != parts_.end())
        for (const Link& link : links->second)
          if (link.num_tokens < count) reach(link.folded, count - link.num_tokens);
    }
  }

  const Pool& pool_;
  const std::vector<Tie>& ties_;
  Links behind_, parts_;
  std::unordered_map<uint64_t, int64_t> num_bad_;
};

}  // namespace kvpool

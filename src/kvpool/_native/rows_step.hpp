// The parts of Rows that make a step.
#pragma once
#include "rows.hpp"

namespace kvpool {

inline void Rows::remove(const std::vector<uint8_t>& is_gone) {
  const size_t num_windows = layout_.windows.size(), count = size();
  size_t to = 0, num_settled = 0, num_unserved = 0;
  num_told_ = 0;
  num_columns_ = 0;
  auto next = unserved_.begin();
  for (size_t at = 0; at < count; at++) {
    const bool is_unserved = next != unserved_.end() && *next == at;
    if (is_unserved) ++next;
    if (is_gone[at]) continue;
    num_columns_ = std::max(num_columns_, rows_[at].num_blocks);
    num_settled += at < num_settled_;
    num_told_ += told_[at];
    if (is_unserved) unserved_[num_unserved++] = static_cast<uint32_t>(to);
    if (to != at) {
      const uint32_t cells = std::max(rows_[at].num_blocks, rows_[to].num_blocks);
      blocks_.move(at, to, cells);
      rows_[to] = std::move(rows_[at]);
      lengths_[to] = lengths_[at];
      fills_[to] = fills_[at];
      told_[to] = told_[at];
      recent_[to].swap(recent_[at]);
      for (size_t w = 0; w < num_windows; w++) first_held_[to * num_windows + w] = first_held_[at * num_windows + w];
      // The place is free again; what moves there later must find out how much of it is in use.
      rows_[at].num_blocks = cells;
    }
    to++;
  }
  for (size_t at = to; at < count; at++) blocks_.clear(at, blocks_.columns());
  rows_.resize(to);
  fills_.resize(to);
  told_.resize(to);
  recent_.resize(to);
  first_held_.resize(to * num_windows);
  unserved_.resize(num_unserved);
  num_settled_ = num_settled;
  blocks_.shrink(to + 1, size_t{num_columns_} + 1, to);
}

inline bool Rows::step(const int64_t* tokens, bool is_published, bool is_listened_to, Outcome& outcome) {
  if (!prepare(is_published, outcome, is_listened_to)) return false;
  publish(outcome, is_listened_to);
  append(tokens);
  if (layout_.is_plain()) {
    extend_at_once(outcome, is_listened_to);
  } else {
    extend(outcome, is_listened_to);
  }
  return true;
}

inline void Rows::serve(bool is_listened_to, Outcome& outcome) {
  outcome.clear();
  turns_.clear();
  turns_.reserve(unserved_.size());
  for (const uint32_t at : unserved_) turns_.push_back({at, true});
  unserved_.clear();
  blocks_.reserve(size(), num_columns_ + 1, size());
  outcome.grown.reserve(turns_.size());
  outcome.block_ids.reserve(turns_.size() * layout_.num_groups());
  if (is_listened_to) outcome.removed.reserve_more(turns_.size() * layout_.num_groups());
  if (layout_.is_plain()) {
    extend_at_once(outcome, is_listened_to);
  } else {
    extend(outcome, is_listened_to);
  }
}

// Find the full blocks, and all memory that the step may need; whether it can be made.
//
// A border that was committed before makes no difference to blocks, but to the order of events in several groups.
inline bool Rows::prepare(bool is_published, Outcome& outcome, bool is_listened_to) {
  const size_t count = size();
  outcome.clear();
  full_.clear();
  turns_.clear();
  full_.reserve(count);
  turns_.reserve(count);
  const uint32_t block_size = layout_.block_size;
  const bool needs_full = !layout_.is_plain() && !is_published;
  for (size_t at = 0; at < count; at++) {
    if (fills_[at] == 0 && needs_full) return false;
    if (fills_[at] != block_size) continue;
    if (is_published || lengths_[at] - block_size < rows_[at].plain_from) return false;
    std::vector<int64_t>& recent = recent_[at];
    make_room(recent, block_size);
    full_.push_back(static_cast<uint32_t>(at));
  }
  blocks_.reserve(count, num_columns_ + 1, count);
  outcome.grown.reserve(count);
  outcome.block_ids.reserve(count * layout_.num_groups());
  outcome.stored.reserve(full_.size());
  if (is_listened_to) {
    outcome.removed.reserve_more(count * layout_.num_groups());
    outcome.tokens.reserve(full_.size() * layout_.block_size);
  }
  ids_.resize(std::max(full_.size(), count));
  names_.resize(full_.size());
  singles_.resize(full_.size());
  parents_.resize(full_.size());
  return true;
}

inline void Rows::publish(Outcome& outcome, bool is_listened_to) {
  if (full_.empty()) return;
  for (size_t i = 1; i < layout_.published.size(); i++) pool_.require_unnamed(full_blocks(layout_.published[i].group));
  name_full_blocks(outcome, is_listened_to);
  for (const Published& published : layout_.published) {
    const Ids ids = full_blocks(published.group);
    pool_.commit(ids, {names_.data(), names_.size()}, published.group, parents_.data(),
                 published.is_spare ? ids : Ids{});
  }
  for (size_t i = 0; i < full_.size(); i++) {
    Row& row = rows_[full_[i]];
    row.parent = names_[i];
    fills_[full_[i]] = 0;
  }
}

// The last block of each full row in a group.
inline Ids Rows::full_blocks(unsigned group) {
  for (size_t i = 0; i < full_.size(); i++)
    ids_[i] = blocks_.row(group, full_[i])[lengths_[full_[i]] / layout_.block_size - 1];
  return {ids_.data(), full_.size()};
}

inline void Rows::name_full_blocks(Outcome& outcome, bool is_listened_to) {
  const uint32_t block_size = layout_.block_size;
  for (size_t i = 0; i < full_.size(); i++) {
    const Row& row = rows_[full_[i]];
    const int64_t* last = &*recent_[full_[i]].end() - block_size;
    const Encoded extra{reinterpret_cast<const uint8_t*>(row.extra.data()), row.extra.size()};
    singles_[i] = {row.parent.bytes, last, row.has_extra ? extra : Encoded{}, names_[i].bytes};
    parents_[i] = {Parent::kPlain, secrets().fold(row.parent)};
    if (is_listened_to) outcome.tokens.insert(outcome.tokens.end(), last, last + block_size);
  }
  messages_.names(singles_.data(), full_.size());
  for (size_t i = 0; i < full_.size(); i++)
    outcome.stored.push_back({full_[i], names_[i], rows_[full_[i]].parent});
}

inline void Rows::append(const int64_t* tokens) {
  const size_t count = size();
  const bool is_windowed = !layout_.windows.empty();
  const uint8_t* lets_go_after = layout_.lets_go_after.data();
  for (size_t at = 0; at < count; at++) {
    const bool lets_go = is_windowed && (lets_go_after[fills_[at]] || at >= num_settled_);
    // Whoever has no room stands behind a full block.
    if (lets_go || !fills_[at]) turns_.push_back({static_cast<uint32_t>(at), lets_go});
    recent_[at].push_back(tokens[at]);
  }
  int64_t* lengths = lengths_.data();
  for (size_t at = 0; at < count; at++) lengths[at]++;
  for (uint32_t& fill : fills_) fill++;
  note_width(tokens, count, 0, 1);
  num_settled_ = count;
}

// Blocks for each row whose last token has no room, in order, for whom there are any.
inline void Rows::extend(Outcome& outcome, bool is_listened_to) {
  const unsigned num_groups = layout_.num_groups();
  int32_t taken[kMostGroups];
  for (const Turn& turn : turns_) {
    if (turn.lets_go) let_go(turn.row);
    if (num_slots(rows_[turn.row]) >= lengths_[turn.row]) continue;
    if (allocate(num_groups, taken, outcome, is_listened_to)) {
      outcome.grown.push_back(turn.row);
      outcome.block_ids.insert(outcome.block_ids.end(), taken, taken + num_groups);
      grow(turn.row, taken);
    } else {
      unserved_.push_back(turn.row);
    }
  }
}

// The same where one group keeps everything, so that all blocks are taken at once.
inline void Rows::extend_at_once(Outcome& outcome, bool is_listened_to) {
  for (const Turn& turn : turns_)
    if (num_slots(rows_[turn.row]) < lengths_[turn.row]) outcome.grown.push_back(turn.row);
  const size_t wanted = outcome.grown.size(), num_served = std::min<size_t>(wanted, pool_.num_free());
  unserved_.insert(unserved_.end(), outcome.grown.begin() + num_served, outcome.grown.end());
  outcome.grown.resize(num_served);
  outcome.block_ids.resize(num_served);
  allocate(num_served, outcome.block_ids.data(), outcome, is_listened_to);
  for (size_t i = 0; i < num_served; i++) grow(outcome.grown[i], &outcome.block_ids[i]);
}

// Let go of what the next token does not look at, group after group, tail first.
inline void Rows::let_go(size_t at) {
  const size_t num_windows = layout_.windows.size();
  Row& row = rows_[at];
  int64_t computed = lengths_[at] - 1;
  if (layout_.keeps_last_border) computed -= computed % layout_.block_size;
  uint32_t* held = first_held_.data() + at * num_windows;
  uint32_t first[kMostGroups], live[kMostGroups];
  bool is_any = false;
  for (size_t w = 0; w < num_windows; w++) {
    const Window& window = layout_.windows[w];
    const int64_t first_live = std::max<int64_t>(computed - window.num_tokens + 1, 0) / layout_.block_size;
    live[w] = std::max(static_cast<uint32_t>(first_live), held[w]);
    first[w] = std::max(held[w], window.num_sink_blocks);
    is_any |= live[w] > held[w];
  }
  if (!is_any) return;
  ids_.clear();
  for_each_dead(row, at, first, live, [&](int32_t& id) { ids_.push_back(id); });
  const Ids ids{ids_.data(), ids_.size()};
  if (pool_.free(ids, Runs::kParted) < ids.size) throw Broken("invariant 1: a block is freed more often than held");
  for_each_dead(row, at, first, live, [](int32_t& id) { id = kNullBlock; });
  std::copy(live, live + num_windows, held);
}

// Every block that is held and dead, group after group, tail first; a null block behind each group.
template <class Do>
void Rows::for_each_dead(const Row& row, size_t at, const uint32_t* first, const uint32_t* live, Do do_with) const {
  for (unsigned group = 0; group < layout_.num_groups(); group++) {
    const unsigned w = layout_.window_of[group];
    if (w == kKeepsAll) continue;
    int32_t* ids = blocks_.row(group, at);
    for (uint32_t stop = std::min(live[w], row.num_blocks); stop > first[w]; stop--)
      if (ids[stop - 1]) do_with(ids[stop - 1]);
    int32_t end = kNullBlock;
    do_with(end);
  }
}

inline bool Rows::allocate(size_t count, int32_t* taken, Outcome& outcome, bool is_listened_to) {
  return pool_.allocate(count, taken, is_listened_to ? &outcome.removed : nullptr);
}

inline void Rows::grow(size_t at, const int32_t* ids) {
  Row& row = rows_[at];
  for (unsigned group = 0; group < layout_.num_groups(); group++) blocks_.row(group, at)[row.num_blocks] = ids[group];
  num_columns_ = std::max(num_columns_, ++row.num_blocks);
}

}  // namespace kvpool

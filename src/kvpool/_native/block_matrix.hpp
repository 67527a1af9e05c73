// Memory that others may go on reading, and the block tables of all rows of a batch in one piece of it.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>

#include "zeroed.hpp"

namespace kvpool {

// Values that live as long as anybody reads them, though the owner has moved on to a larger piece.
template <class T>
class Shared {
 public:
  explicit Shared(size_t size) : values_(std::make_shared<Zeroed<T>>(size)) {}

  T* data() const { return values_->data(); }
  T& operator[](size_t at) const { return values_->data()[at]; }
  std::shared_ptr<void> keeper() const { return values_; }

 private:
  std::shared_ptr<Zeroed<T>> values_;
};

// Block ids: groups x rows x columns, larger by doubling. Null blocks behind what a row has.
class BlockMatrix {
 public:
  explicit BlockMatrix(unsigned num_groups) : num_groups_(num_groups), cells_(num_groups * kFirst * kFirst) {}

  int32_t* row(unsigned group, size_t row) const { return cells_.data() + (group * rows_ + row) * columns_; }
  size_t columns() const { return columns_; }
  std::shared_ptr<void> keeper() const { return cells_.keeper(); }

  // Room for so many rows, and columns of each; what the first `used` rows have is kept.
  void reserve(size_t rows, size_t columns, size_t used) {
    if (rows <= rows_ && columns <= columns_) return;
    resize(doubled(rows_, rows), doubled(columns_, columns), used);
  }

  // The same room in less memory, where a quarter would do; as it was where there is none to copy to.
  void shrink(size_t rows, size_t columns, size_t used) {
    const size_t fewer_rows = std::min(doubled(kFirst, rows), rows_);
    const size_t fewer_columns = std::min(doubled(kFirst, columns), columns_);
    if (4 * fewer_rows * fewer_columns > rows_ * columns_) return;
    try {
      resize(fewer_rows, fewer_columns, used);
    } catch (const std::bad_alloc&) {
    }
  }

  // A row goes to the place of one that is gone. `count` cells of both are in use at most.
  void move(size_t from, size_t to, size_t count) const {
    for (unsigned group = 0; group < num_groups_; group++) std::memcpy(row(group, to), row(group, from), 4 * count);
  }

  void clear(size_t at, size_t count) const {
    for (unsigned group = 0; group < num_groups_; group++) std::memset(row(group, at), 0, 4 * count);
  }

 private:
  static constexpr size_t kFirst = 16;

  static size_t doubled(size_t size, size_t least) {
    while (size < least) size *= 2;
    return size;
  }

  void resize(size_t rows, size_t columns, size_t used) {
    Shared<int32_t> other(num_groups_ * rows * columns);
    for (unsigned group = 0; group < num_groups_; group++)
      for (size_t at = 0; at < used; at++)
        std::memcpy(other.data() + (group * rows + at) * columns, row(group, at), 4 * std::min(columns, columns_));
    cells_ = other, rows_ = rows, columns_ = columns;
  }

  unsigned num_groups_;
  size_t rows_ = kFirst, columns_ = kFirst;
  Shared<int32_t> cells_;
};

}  // namespace kvpool

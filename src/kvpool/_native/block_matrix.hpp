// Memory that others may go on reading, and the block tables of all rows of a batch in one piece of it.
#pragma once
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
    size_t more_rows = rows_, more_columns = columns_;
    while (more_rows < rows) more_rows *= 2;
    while (more_columns < columns) more_columns *= 2;
    Shared<int32_t> larger(num_groups_ * more_rows * more_columns);
    for (unsigned group = 0; group < num_groups_; group++)
      for (size_t at = 0; at < used; at++)
        std::memcpy(larger.data() + (group * more_rows + at) * more_columns, row(group, at), 4 * columns_);
    cells_ = larger, rows_ = more_rows, columns_ = more_columns;
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

  unsigned num_groups_;
  size_t rows_ = kFirst, columns_ = kFirst;
  Shared<int32_t> cells_;
};

}  // namespace kvpool

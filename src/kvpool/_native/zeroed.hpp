// Large arrays of zeros that cost nothing until they are written.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>
#include <type_traits>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvpool {

// `size` values of all zero bits, each page of them made when it is first touched. Aligned to 64 bytes.
template <class T>
class Zeroed {
  static_assert(std::is_trivially_copyable<T>::value && alignof(T) <= 64, "plain values only");

 public:
  explicit Zeroed(size_t size) : size_(size) {
    if (size > static_cast<size_t>(-1) / 2 / sizeof(T)) throw std::bad_alloc();
#if defined(__linux__)
    if (bytes() >= kMapped) {
      start_ = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (start_ == MAP_FAILED) throw std::bad_alloc();
      madvise(start_, bytes(), MADV_HUGEPAGE);  // scattered reads then miss the address caches less
      values_ = static_cast<T*>(start_);
      return;
    }
#endif
    start_ = std::calloc(bytes() + 64, 1);
    if (!start_) throw std::bad_alloc();
    values_ = reinterpret_cast<T*>((reinterpret_cast<size_t>(start_) + 63) & ~static_cast<size_t>(63));
  }

  ~Zeroed() {
#if defined(__linux__)
    if (bytes() >= kMapped) {
      munmap(start_, bytes());
      return;
    }
#endif
    std::free(start_);
  }

  Zeroed(const Zeroed&) = delete;
  Zeroed& operator=(const Zeroed&) = delete;

  T& operator[](size_t at) { return values_[at]; }
  const T& operator[](size_t at) const { return values_[at]; }
  T* data() { return values_; }
  size_t bytes() const { return size_ * sizeof(T); }

 private:
  static constexpr size_t kMapped = size_t{1} << 21;

  size_t size_;
  void* start_ = nullptr;
  T* values_ = nullptr;
};

}  // namespace kvpool

#include "parallel.h"

#include <atomic>
#include <cstdlib>
#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif
#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

namespace xncaps {
namespace {

constexpr size_t kKept = size_t{8} << 20;  // more than this is given back after the call

std::atomic<size_t> held{0}, peak{0};

void note(size_t size) {
  const size_t now = held.fetch_add(size) + size;
  size_t before = peak.load();
  while (before < now && !peak.compare_exchange_weak(before, now)) {
  }
}

}  // namespace

class Memory {
 public:
  bool in_use = false;

  ~Memory() { release(); }

  char* at_least(size_t bytes) {
    if (bytes > size_) {
      release();
      const size_t size = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(std::aligned_alloc(4096, size));
      if (data_ == nullptr) return nullptr;
      size_ = size;
      note(size);
    }
    return data_;
  }

  char* data() const { return data_; }
  bool fits(size_t bytes) const { return bytes <= size_; }

  void release_if_large() {
    if (size_ > kKept) release();
  }

  void release() {
    std::free(data_);
    held.fetch_sub(size_);
    data_ = nullptr;
    size_ = 0;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

namespace {

constexpr int kBuffers = 2;
thread_local Memory memory, buffers[kBuffers];

}  // namespace

// Training asks for the same buffers in every step: two are kept for the next call.
Buffer::Buffer(size_t bytes) : memory_(nullptr) {
  if (bytes == 0) return;
  for (Memory& each : buffers) {
    if (!each.in_use && (memory_ == nullptr || each.fits(bytes))) memory_ = &each;
  }
  if (memory_ == nullptr) memory_ = new Memory();
  memory_->in_use = true;
  if (memory_->at_least(bytes) == nullptr) {
    give_back();
    throw std::bad_alloc();
  }
}

Buffer::~Buffer() { give_back(); }

char* Buffer::data() const { return memory_ == nullptr ? nullptr : memory_->data(); }

void Buffer::give_back() {
  if (memory_ == nullptr) return;
  memory_->in_use = false;
  memory_->release_if_large();
  if (memory_ < buffers || memory_ >= buffers + kBuffers) delete memory_;
}

char* scratch(size_t bytes) { return memory.at_least(bytes > 0 ? bytes : 1); }

int64_t first_cache_bytes() {
  static const int64_t bytes = [] {
    int64_t said = 0;
#ifdef _SC_LEVEL1_DCACHE_SIZE
    said = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#endif
    return said > 0 ? said : int64_t{32} << 10;
  }();
  return bytes;
}

size_t scratch_peak() { return peak.load(); }

void reset_scratch_peak() {
  memory.release();
  for (Memory& each : buffers) {
    if (!each.in_use) each.release();
  }
  peak.store(held.load());
}

void run_parallel(int64_t count, int threads, size_t bytes, Work work, const void* context) {
  if (count < threads) threads = static_cast<int>(count);
  bool failed = false;
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads) reduction(|| : failed)
    {
      char* mine = scratch(bytes);
      if (mine == nullptr) {
        failed = true;
      } else {
        const int64_t all = omp_get_num_threads(), me = omp_get_thread_num();
        for (int64_t index = count * me / all; index < count * (me + 1) / all; ++index) {
          work(context, index, mine);
        }
        memory.release_if_large();
      }
    }
    if (failed) throw std::bad_alloc();
    return;
  }
#endif
  char* mine = count > 0 ? scratch(bytes) : nullptr;
  if (count > 0 && mine == nullptr) throw std::bad_alloc();
  for (int64_t index = 0; index < count; ++index) work(context, index, mine);
  memory.release_if_large();
}

}  // namespace xncaps

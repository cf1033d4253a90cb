// Memory to work in and threads to share work, kept out of the kernels: they are compiled for one
// instruction set each, and whatever the standard library puts into them might be used elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xncaps {

// `bytes` bytes at a multiple of 64 that belong to this thread until its next call. Null if there is
// no memory. Small ones are kept for the next call.
char* scratch(size_t bytes);

// How much the smallest cache of this machine holds; 32 kB where it does not say.
int64_t first_cache_bytes();

// The most bytes of scratch and buffers that were held at once since the last reset.
size_t scratch_peak();
void reset_scratch_peak();  // and gives back what this thread has kept

class Memory;

// Memory of a call that all threads share; null if no bytes are asked for. Throws std::bad_alloc.
class Buffer {
 public:
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* data() const;

 private:
  void give_back();

  Memory* memory_;
};

using Work = void (*)(const void* context, int64_t index, char* memory);

// Calls work(context, index, memory) for every index below count, shared among so many threads, each
// with its own `bytes` of memory. One index or one thread opens no parallel region. Throws
// std::bad_alloc, before any work is done by the thread that got no memory.
void run_parallel(int64_t count, int threads, size_t bytes, Work work, const void* context);

namespace {  // compiled anew for every instruction set

template <class Function>
void parallel(int64_t count, int threads, size_t bytes, const Function& function) {
  const Work call = [](const void* context, int64_t index, char* memory) {
    (*static_cast<const Function*>(context))(index, memory);
  };
  run_parallel(count, threads, bytes, call, &function);
}

// Hands out parts of a piece of memory, each at a multiple of 64 bytes. Without memory it counts.
class Parts {
 public:
  explicit Parts(char* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    char* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(part);
  }

  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

}  // namespace
}  // namespace xncaps

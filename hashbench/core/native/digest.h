// Digests of tensors and generators; equal to those of hashbench/core/trace/digest.py.
//
// Part of recorder.cpp, which is one translation unit.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "tables.h"

namespace {

// Keys of a plain tensor: dense, on the CPU, not lazily conjugated or negated.
const c10::DispatchKeySet kPlain(
    {c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastCPU});

// Larger contents are hashed by pieces (hashbench/core/trace/digest.py, `hash_memory`), possibly in parallel.
constexpr size_t kPiece = 1 << 16;
constexpr size_t kAlone = 2;  // pieces hashed by one thread: below 128 KiB of floats, at::parallel_for runs most kernels on one

struct Pieces {
  const char* data;
  size_t size, count;
  uint64_t* digests;  // big-endian

  void hash_from(size_t begin, size_t end) const noexcept {
    for (size_t i = begin; i < end; i++) {
      const uint64_t made = hash(data + i * kPiece, std::min(kPiece, size - i * kPiece));
      for (int byte = 0; byte < 8; byte++) reinterpret_cast<uint8_t*>(digests + i)[byte] = made >> (56 - 8 * byte) & 255;
    }
  }
};

// Torch's own OpenMP threads. Each hashes the pieces that at::parallel_for would assign to it, which the kernel most likely
// left in that core's cache: reading them from another core's takes twice as long, and evicts them for the next kernel.
struct Team {
  void (*run)(void (*function)(void*), void* argument, unsigned threads, unsigned flags) = nullptr;
  int (*place)() = nullptr;  // thread number
  int (*size)() = nullptr;
  int (*pause)(int kind) = nullptr;
};
Team team;
thread_local bool team_was_run = false;  // a digest in this thread has used the team

void hash_share(void* pieces) {
  const auto& all = *static_cast<const Pieces*>(pieces);
  const size_t share = (all.count + team.size() - 1) / team.size(), begin = team.place() * share;
  all.hash_from(begin, std::min(all.count, begin + share));
}

// Timing of one thread and of the team, by size class. A sleeping team (OMP_WAIT_POLICY), or one on busy cores, can take ten
// times as long as one thread: both are timed, the slower one occasionally.
class Pace {
  static constexpr uint32_t kAgain = 128;
  std::atomic<uint32_t> calls{0};
  std::array<std::atomic<float>, 2> seconds{};  // one thread, team; 0: unknown

 public:
  template <typename F>
  void run(const F& hashed_by) {
    const float alone = seconds[0].load(std::memory_order_relaxed), shared = seconds[1].load(std::memory_order_relaxed);
    const bool slower = calls.fetch_add(1, std::memory_order_relaxed) % kAgain == kAgain - 1;
    const bool by_team = !shared || (alone && (shared < alone) != slower);
    const auto start = std::chrono::steady_clock::now();
    hashed_by(by_team);
    const std::chrono::duration<float> taken = std::chrono::steady_clock::now() - start;
    const float before = slower ? 0 : by_team ? shared : alone;
    seconds[by_team].store(before ? before + (taken.count() - before) / 8 : taken.count(), std::memory_order_relaxed);
  }
};
std::array<Pace, 64> paces;  // by bit width of the number of pieces

[[gnu::hot]] uint64_t hash_content(const char* data, size_t size) {
  if (size <= kPiece) return hash(data, size);
  const size_t count = (size + kPiece - 1) / kPiece;
  std::vector<uint64_t> digests(count);
  Pieces all{data, size, count, digests.data()};
  if (count <= kAlone || !team.run || at::get_num_threads() == 1) all.hash_from(0, count);
  else paces[std::bit_width(count)].run([&](bool by_team) {
    if (!by_team) return all.hash_from(0, count);
    team_was_run = true;
    team.run(hash_share, &all, 0, 0);  // the full team: another size would destroy and create threads
  });
  return hash(digests.data(), count * sizeof(uint64_t));
}

[[gnu::hot]] bool is_plain(const Recorder& recorder, const at::Tensor& tensor) {
  return !(tensor.key_set().raw_repr() & ~kPlain.raw_repr()) &&
      !(recorder.odd_dtypes >> static_cast<int>(tensor.scalar_type()) & 1) && tensor.dim() <= 32 &&
      tensor.unsafeGetTensorImpl()->unsafe_storage();
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

[[gnu::hot]] uint32_t meta_of(Recorder& recorder, const at::Tensor& tensor) {
  int64_t buffer[1 + 2 * 32];
  const auto sizes = tensor.sizes();
  const size_t dims = sizes.size();
  buffer[0] = static_cast<int64_t>(tensor.scalar_type());
  std::memcpy(buffer + 1, sizes.data(), dims * 8);
  size_t count = 1 + dims;
  if (!tensor.is_contiguous()) {
    std::memcpy(buffer + count, tensor.strides().data(), dims * 8);
    count += dims;
    buffer[0] |= 1 << 8;
  }
  return recorder.metas.number(hash, {reinterpret_cast<const char*>(buffer), count * 8});
}

// Drops the repeated rows of an expanded tensor; logical order.
void gather(const char* from, c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t dim, size_t item, std::string& out) {
  if (dim == sizes.size()) {
    out.append(from, item);
    return;
  }
  const int64_t size = strides[dim] == 0 ? 1 : sizes[dim];
  const auto step = strides[dim] * static_cast<int64_t>(item);
  if (dim + 1 == sizes.size() && strides[dim] == 1) {
    out.append(from, static_cast<size_t>(size) * item);
    return;
  }
  for (int64_t i = 0; i < size; i++) gather(from + i * step, sizes, strides, dim + 1, item, out);
}

// True if the storage covers the whole tensor: it may be shrunk under it.
[[gnu::hot]] bool is_whole(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor.storage_offset() * tensor.itemsize() + tensor.nbytes() <= storage_of(tensor)->nbytes();
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset()) <=
      storage_of(tensor)->nbytes();
}

[[gnu::hot]] uint64_t digest(const Recorder& recorder, const at::Tensor& tensor) {
  if (!recorder.hashes) return 0;
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  if (!tensor.numel() || !data || !is_whole(tensor)) return hash("", 0);
  if (tensor.is_non_overlapping_and_dense()) return hash_content(data, tensor.nbytes());
  std::string packed;
  gather(data, tensor.sizes(), tensor.strides(), 0, tensor.element_size(), packed);
  return hash_content(packed.data(), packed.size());
}

uint64_t generator_digest(at::Generator generator) {
  if (!generator.defined()) generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> guard(generator.mutex());
  const at::Tensor state = generator.get_state();
  return hash(state.const_data_ptr(), state.nbytes());
}

}  // namespace

// Raw records of a trace, and the tables that it needs: last writers of storages, names of tensors, modules.
//
// Part of recorder.cpp, which is one translation unit.

#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Hash = uint64_t (*)(const void*, size_t);
Hash hash = nullptr;  // XXH3, of the xxhash wheel

// ------------------------------------------------------------------------------------------------------- raw records

struct Read {
  int32_t node;      // records count from 0, leaves from -1 down
  int32_t argument;  // position | (index in a list + 1) << 8
  int64_t offset;
};

struct Write {
  uint64_t digest;
  uint32_t meta;   // number of the interned dtype, shape and stride; the number of the digest if Python made it
  uint32_t state;  // 0: hashed, 1: uninitialized, 2: hashed by Python
};

struct Record {
  int64_t sequence;
  uint64_t rng;
  int32_t op;  // -1: recorded by Python
  uint32_t others, context, first_read, first_write, scalar;
  int32_t parent;
  uint32_t reads, writes, lane;
};

struct Leaf {
  uint64_t storage, digest;
  int64_t position;
  uint32_t meta, context;
  int32_t name;  // number of a registered tensor; -1: none, -2: unregistered nn.Parameter, -3: recorded by Python
  uint32_t unused;
};

// Records of a thread that the program started, or of a task in a thread pool. Lane 0 is the main thread.
struct Lane {
  int32_t parent, position;  // the lane that started it, and the number of records at that time
  int32_t caller;            // record of the enclosing op; -1: none, or unfinished
  uint32_t context;
};

// ------------------------------------------------------------------------------------------------------------ tables

// List that grows without reallocation.
template <typename T>
struct Chunked {
  static constexpr size_t kBits = 14, kSize = size_t(1) << kBits;
  std::vector<std::unique_ptr<T[]>> chunks;
  size_t count = 0;
  T *room = nullptr, *end = nullptr;  // free space of the last chunk

  void clear() {
    count = 0;
    if (chunks.size() > 1) chunks.resize(1);
    if (!chunks.empty()) room = chunks[0].get(), end = room + kSize;
  }
  [[gnu::hot]] void push(const T& item) {
    if (room == end) room = chunks.emplace_back(new T[kSize]).get(), end = room + kSize;
    *room++ = item;
    count++;
  }
  // Prefetch the next slots.
  void fetch() const {
    __builtin_prefetch(room, 1);
    __builtin_prefetch(reinterpret_cast<const char*>(room + 1) - 1, 1);
  }
  T& operator[](size_t i) { return chunks[i >> kBits][i & (kSize - 1)]; }
  void copy(size_t number, T* out) {
    for (size_t i = 0; i < number; i++) out[i] = (*this)[i];
  }
};

size_t spread(const void* address) {
  return static_cast<size_t>((reinterpret_cast<uintptr_t>(address) >> 4) * 0x9E3779B97F4A7C15ull >> 20);
}
size_t spread(uint64_t hash) { return hash; }

// Hash table with open addressing and a power-of-two size. A slot has a `key` (a number or an address) and `is_free`.
template <typename Slot>
class Slots {
  const size_t fewest;
  const Slot free;
  std::vector<Slot> all;

 public:
  Slots(size_t fewest, Slot free) : fewest(fewest), free(free), all(fewest, free) {}
  size_t mask() const { return all.size() - 1; }
  Slot& operator[](size_t i) { return all[i & mask()]; }
  // Slot of a key, or the free slot for it.
  template <typename Key>
  [[gnu::hot]] Slot* place(Key key) {
    size_t i = spread(key);
    while (!(*this)[i].is_free() && (*this)[i].key != key) i++;
    return &(*this)[i];
  }
  // Slot for a new key, the `used`-th; grows the table if necessary.
  template <typename Key>
  Slot* place_of_new(Key key, size_t used) {
    if (used * 2 > all.size())
      for (const Slot& old : renew(all.size() * 2))
        if (!old.is_free()) *place(old.key) = old;
    return place(key);
  }
  size_t index(const Slot* slot) const { return static_cast<size_t>(slot - all.data()); }
  auto begin() { return all.begin(); }
  auto end() { return all.end(); }
  // Frees all slots.
  void clear() {
    if (all.size() == fewest) std::fill(all.begin(), all.end(), free);
    else renew(fewest);
  }
  std::vector<Slot> renew(size_t size) {
    std::vector<Slot> old(size, free);
    old.swap(all);
    return old;
  }
};

// Interned byte strings, by number. Equal XXH3 hashes count as equal strings, as for contents of tensors.
struct Interned {
  static constexpr size_t kBlock = 1 << 14;
  struct Slot {
    uint64_t key;  // the hash
    int32_t number;
    bool is_free() const { return number < 0; }
  };
  std::vector<std::string_view> all;  // views into `blocks`, stable while Python reads them
  std::vector<std::unique_ptr<char[]>> blocks;
  char* room = nullptr;  // free space of the last block
  size_t left = 0;
  Slots<Slot> slots{128, {0, -1}};  // few: each used slot is another cache line

  void clear() {
    all.clear();
    if (all.capacity() > kBlock) all.shrink_to_fit();
    if (blocks.size() > 1) blocks.resize(1);
    if (!blocks.empty()) room = blocks[0].get(), left = kBlock;
    slots.clear();
  }
  [[gnu::hot]] uint32_t number(Hash hash, std::string_view text) {
    const uint64_t h = hash(text.data(), text.size());
    Slot* slot = slots.place(h);
    if (!slot->is_free()) return static_cast<uint32_t>(slot->number);
    const auto number = static_cast<int32_t>(all.size());
    all.push_back(kept(text.data(), text.size()));
    *slots.place_of_new(h, all.size()) = {h, number};
    return static_cast<uint32_t>(number);
  }
  std::string_view kept(const char* data, size_t size) {
    if (size > left) blocks.emplace_back(new char[left = std::max(size, kBlock)]), room = blocks.back().get();
    std::memcpy(room, data, size);
    const std::string_view made(room, size);
    room += size, left -= size;
    return made;
  }
};

// Storage -> last writer. A weak reference keeps the StorageImpl struct but not its memory, so that its address is not
// reused. Dead StorageImpl structs fragment the heap, which then has no room for the next large block: release recent ones
// eagerly, and sweep all at +25 % (small ones: +100 %): a sweep touches every struct, and all are cold.
struct Writers {
  struct Entry {
    c10::StorageImpl* key;
    int32_t node;
    int32_t python;  // Python has further state: parts of a leaf, or a collective in flight
    bool is_free() const { return !key; }
  };
  static constexpr size_t kFewest = 256, kWeight = 4;
  static constexpr int64_t kLarge = 1 << 17;  // bytes
  Slots<Entry> slots{1024, {nullptr, 0, 0}};
  std::array<const c10::StorageImpl*, 16> last{};  // most recent entries; may have left the table
  size_t used = 0, entered = 0, weight = 0, sweep_at = kFewest;  // a large storage has weight 4

  void clear() {
    for (auto& entry : slots)
      if (entry.key) c10::raw::weak_intrusive_ptr::decref(entry.key);
    slots.clear();
    last = {};
    used = entered = weight = 0;
    sweep_at = kFewest;
  }
  [[gnu::hot]] Entry* find(const c10::StorageImpl* storage) {
    Entry* entry = slots.place(storage);
    return entry->is_free() ? nullptr : entry;
  }
  [[gnu::hot]] void set(c10::StorageImpl* storage, int32_t node, int32_t python) {
    if (Entry* entry = find(storage)) {
      entry->node = node;
      entry->python = python;
      return;
    }
    if (Entry* entry = find(last[entered % last.size()]); entry && is_gone(*entry)) erase(entry);
    last[entered % last.size()] = storage;
    entered++;
    weight += storage->sym_nbytes().maybe_as_int().value_or(0) < kLarge ? 1 : kWeight;
    if (weight >= sweep_at) sweep();
    c10::raw::weak_intrusive_ptr::incref(storage);
    *slots.place(storage) = {storage, node, python};
    used++;
  }
  static bool is_gone(const Entry& entry) { return !c10::raw::weak_intrusive_ptr::use_count(entry.key); }
  void erase(Entry* entry) {
    c10::raw::weak_intrusive_ptr::decref(entry->key);
    used--;
    size_t free = slots.index(entry);
    slots[free].key = nullptr;
    for (size_t i = free + 1; slots[i].key; i++) {
      if (((i - spread(slots[i].key)) & slots.mask()) < ((i - free) & slots.mask())) continue;  // stays reachable
      slots[free] = slots[i];
      slots[i].key = nullptr;
      free = i;
    }
  }
  void sweep() {
    std::vector<Entry> left;
    for (const Entry& entry : slots) {
      if (!entry.key) continue;
      if (is_gone(entry)) c10::raw::weak_intrusive_ptr::decref(entry.key);
      else left.push_back(entry);
    }
    used = left.size();
    size_t size = 1024;
    while (size < used * 4) size *= 2;
    slots.renew(size);
    for (const Entry& entry : left) *slots.place(entry.key) = entry;
    sweep_at = weight + std::max(kFewest, used);
  }
};

// Tensors named by a model or the caller. They are identified by address and storage (weakly referenced), since
// torch.utils.swap_tensors refuses a tensor with weak references.
struct Names {
  struct Slot {
    c10::TensorImpl* key;
    c10::StorageImpl* storage;
    int32_t number;
    bool is_free() const { return !key; }
  };
  Slots<Slot> slots{256, {nullptr, nullptr, -1}};
  size_t used = 0;

  void clear() {
    for (const auto& slot : slots)
      if (slot.storage) c10::raw::weak_intrusive_ptr::decref(slot.storage);
    slots.clear();
    used = 0;
  }
  void set(c10::TensorImpl* tensor, int32_t number) {
    Slot* slot = slots.place(tensor);
    if (slot->is_free()) slot = slots.place_of_new(tensor, ++used);
    c10::StorageImpl* storage = storage_of(tensor);
    if (storage) c10::raw::weak_intrusive_ptr::incref(storage);
    if (slot->storage) c10::raw::weak_intrusive_ptr::decref(slot->storage);
    *slot = {tensor, storage, number};
  }
  // -1: none. If `certain` is false, another tensor may have this address: Python decides.
  int32_t of(c10::TensorImpl* tensor, bool& certain) {
    const Slot* slot = slots.place(tensor);
    certain = slot->storage && slot->storage == storage_of(tensor);
    return slot->number;
  }
  static c10::StorageImpl* storage_of(const c10::TensorImpl* tensor) {
    return tensor->has_storage() ? tensor->unsafe_storage().unsafeGetStorageImpl() : nullptr;
  }
};

// Spin lock; unlock is a release store, no locked RMW, which would wait for all earlier stores (a call's results and records
// miss the cache). Held for microseconds, except while a large leaf is hashed.
struct Lock {
  std::atomic<bool> held{false};

  void lock() {
    for (unsigned tries = 0; held.exchange(true, std::memory_order_acquire);)
      while (held.load(std::memory_order_relaxed))
        if (++tries < 64) std::this_thread::yield();
        else std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  void unlock() { held.store(false, std::memory_order_release); }
};
using Guard = std::lock_guard<Lock>;

// Stack of the modules that a thread is in, by indices assigned by Python; 0 is outside of all. Guarded by the GIL.
struct Modules {
  struct Slot {
    const void* key;
    uint32_t place;
    bool is_free() const { return !key; }
  };
  struct Inside {
    const void* module;
    uint32_t before;
  };
  Slots<Slot> slots{128, {nullptr, 0}};
  std::vector<Inside> inside;
  size_t used = 0;
  uint32_t start = 0, place = 0;  // their sum is the context's number

  void clear() {
    forget();
    inside.clear();
    start = place = 0;
  }
  void forget() {
    slots.clear();
    used = 0;
  }
  void know(const void* module, uint32_t at) {
    Slot* slot = slots.place(module);
    if (slot->is_free()) slot = slots.place_of_new(module, ++used);
    *slot = {module, at};
  }
  bool enter(const void* module) {  // false if unknown
    const Slot* slot = slots.place(module);
    if (slot->is_free()) return false;
    inside.push_back({module, place});
    place = slot->place;
    return true;
  }
  void leave(const void* module) {  // and all modules entered since
    for (size_t depth = inside.size(); depth-- > 0;)
      if (inside[depth].module == module) {
        place = inside[depth].before;
        inside.resize(depth);
        return;
      }
  }
};

// --------------------------------------------------------------------------------------------------------- one trace

// Buffers of a trace. Reused by the next trace: page faults take longer than filling them.
struct Tables {
  static inline std::atomic<Tables*> spare{nullptr};
  Chunked<Record> records;
  Chunked<Read> reads;
  Chunked<Write> writes;
  Chunked<Leaf> leaves;
  Chunked<Lane> lanes;
  Interned others, metas;
  Writers writers;
  Names names;
  Modules modules;

  static Tables* taken() {
    Tables* kept = spare.exchange(nullptr);
    return kept ? kept : new Tables();
  }
  void give_back() {
    records.clear(), reads.clear(), writes.clear(), leaves.clear(), lanes.clear();
    others.clear(), metas.clear();
    writers.clear(), names.clear(), modules.clear();
    delete spare.exchange(this);
  }
};

struct Op;
constexpr int32_t kFirstKernel = 1 << 30;  // number of the first callee that is no op

struct Recorder {
  Lock lock;  // never held while calling Python: another thread may hold the GIL and wait for it
  bool hashes = true;
  bool everything_python = false;  // every call has an observer
  bool nothing_recorded = false;   // and nothing is recorded
  std::atomic<bool> backward_python{false};
  std::atomic<uint32_t> context{0};
  std::atomic<int32_t> failed{-1};
  uint64_t odd_dtypes = 0;
  Tables* const tables = Tables::taken();
  Chunked<Record>& records = tables->records;
  Chunked<Read>& reads = tables->reads;
  Chunked<Write>& writes = tables->writes;
  Chunked<Leaf>& leaves = tables->leaves;
  Chunked<Lane>& lanes = tables->lanes;
  Interned &others = tables->others, &metas = tables->metas;
  Writers& writers = tables->writers;
  Names& names = tables->names;
  Modules& modules = tables->modules;
  std::vector<std::shared_ptr<const Op>> kernels;  // callees that are no ops
  bool over = false;  // calls in progress are no longer recorded
  int32_t calls = 0;  // in progress
  bool dropped = false;
  uint64_t thread = 0, trace = 0;  // its thread, and its number within this process

  ~Recorder() { tables->give_back(); }
  void set_context() { context.store(modules.start + modules.place, std::memory_order_relaxed); }
};

std::atomic<Recorder*> current{nullptr};

}  // namespace

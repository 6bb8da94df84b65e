// Records every dispatched call: its reads, its writes, and digests of the written tensors.
//
// A fallback on a dispatch key unused by torch, and kernels of common ops at that key, see every call just before its
// backend kernel: below autograd, autocast, functorch's transforms, dispatch modes and tensor subclasses, which turn one
// call into those that are computed. They do not change what is dispatched, hold no tensor, and call no operator. Calls
// that they cannot record (a sparse tensor, an accelerator, a collective), and calls with an observer, are forwarded to
// Python by a second key.
//
// Loaded by hashbench/native/library.py, which documents the entry points at the end.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/alias_ops.h>
#include <ATen/ops/as_strided_ops.h>
#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_dense_backward_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/hardsigmoid_backward_ops.h>
#include <ATen/ops/hardsigmoid_ops.h>
#include <ATen/ops/hardswish_backward_ops.h>
#include <ATen/ops/hardswish_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/max_pool2d_with_indices_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#else
#include <torch/csrc/autograd/function.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

// The only functions used of Python's C API, so that one library serves every Python.
struct _object;
extern "C" int PyGILState_Ensure();
extern "C" void PyGILState_Release(int);
extern "C" int PyGC_Disable();
extern "C" int PyGC_Enable();
extern "C" void Py_DecRef(_object*);
extern "C" _object* PyLong_FromLong(long);
using Method = _object* (*)(_object*, _object*, _object*);
_object* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

constexpr auto kKey = c10::DispatchKey::Fake;
constexpr auto kPythonKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
const c10::DispatchKeySet kAfter(c10::DispatchKeySet::FULL_AFTER, kKey);
const c10::DispatchKeySet kNotAfter = c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^ kAfter;

// Keys of a plain tensor: dense, on the CPU, not lazily conjugated or negated.
const c10::DispatchKeySet kPlain(
    {c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastCPU});

using Hash = uint64_t (*)(const void*, size_t);

// -------------------------------------------------------------------------------------------------------- op schemas

// Filled by Python, which reads schemas for both tracers (hashbench/trace/op_schema.py).
struct Plan {
  uint64_t written;     // bits of written arguments, by position on the stack
  uint64_t statistics;  // bits of running statistics, written if the argument at `training` is true
  int32_t training;     // -1: always
  uint8_t traced;       // has a tensor
  uint8_t decomposes;   // into calls that are recorded
  uint8_t python;       // recorded by Python
  uint8_t fresh;        // no output shares memory with an argument
  uint8_t blank;        // an allocation: uninitialized
  uint8_t seeded;       // draws random numbers
  uint8_t open;         // its inner calls are recorded too
  uint8_t originals;    // Python needs the tensors themselves, no aliases: they are written after the call
};
using PlanOf = void (*)(int32_t id, const char* name, const char* overload, Plan* plan);

// One argument of a schema. `lists`: may be a list of tensors.
struct Argument {
  enum Usual : uint8_t { kNone, kInt, kDouble, kBool, kOther, kNothing } usual = kNothing;
  bool lists = true;
  union {
    int64_t integer;
    double number;
    const c10::IValue* value;  // of kOther; kept
  };
};

// Packed into few cache lines: they are cold at every call.
struct alignas(64) Op {
  const void* key = nullptr;        // the address of its schema
  std::atomic<Op*> next{nullptr};  // of the same bucket
  int32_t id = 0, arguments = 0, positional = 0, returns = 0;
  Plan plan{};
  c10::SmallVector<Argument, 7> each;

  void fetch() const {
    for (size_t line = 0; line < sizeof(Op); line += 64) __builtin_prefetch(reinterpret_cast<const char*>(this) + line);
  }
};

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

// ------------------------------------------------------------------------------------------------------- one trace

// Callbacks into Python, called with the GIL.
// Number of a leaf's name (`number` is a candidate); -1 if unnamed, -2 for an unnamed Parameter.
using Classify = int32_t (*)(_object* tensor, int32_t number);
using HasData = int32_t (*)(_object* tensor);                         // 0: a placeholder (fake tensor)
// Hashes a record's output, unless uninitialized, and marks it; returns the digest's number.
using DigestOdd = uint32_t (*)(_object* tensor, int32_t number, int32_t blank);
using Failed = void (*)(int32_t op);

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
  bool over = false;  // calls in progress are no longer recorded
  int32_t calls = 0;  // in progress
  bool dropped = false;
  uint64_t thread = 0, trace = 0;  // its thread, and its number within this process

  ~Recorder() { tables->give_back(); }
  void set_context() { context.store(modules.start + modules.place, std::memory_order_relaxed); }
};

Hash hash = nullptr;
PlanOf plan_of = nullptr;
Classify classify = nullptr;
HasData has_data = nullptr;
DigestOdd digest_odd = nullptr;
std::atomic<Recorder*> current{nullptr};

// ---------------------------------------------------------------------------------------------------------------- ops

constexpr size_t kPlaces = 1 << 15;
std::array<std::atomic<Op*>, kPlaces> ops;
std::mutex ops_lock;
int32_t ops_made = 0;

std::atomic<Op*>& place_of(const void* key) { return ops[spread(key) & (kPlaces - 1)]; }

Op* known_op(const void* key) {
  Op* op = place_of(key).load(std::memory_order_acquire);
  while (op && op->key != key) op = op->next.load(std::memory_order_acquire);
  return op;
}

Argument argument_of(const c10::Argument& argument) {
  Argument made;
  made.integer = 0;
  const c10::Type* type = argument.real_type().get();
  if (const auto* optional = type->castRaw<c10::OptionalType>()) type = optional->getElementType().get();
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::NumberType: made.lists = false; break;
    case c10::TypeKind::ListType: {
      const auto item = type->expectRef<c10::ListType>().getElementType()->kind();
      made.lists = item != c10::TypeKind::IntType && item != c10::TypeKind::SymIntType && item != c10::TypeKind::FloatType;
      break;
    }
    default: break;
  }
  if (!argument.default_value()) return made;
  const c10::IValue& value = *argument.default_value();
  made.usual = Argument::kOther;
  if (value.isNone()) made.usual = Argument::kNone;
  else if (value.isInt()) made.usual = Argument::kInt, made.integer = value.toInt();
  else if (value.isDouble()) made.usual = Argument::kDouble, made.number = value.toDouble();
  else if (value.isBool()) made.usual = Argument::kBool, made.integer = value.toBool();
  else made.value = new c10::IValue(value);
  return made;
}

void describe(Op& op, const char* name, const char* overload);

Op* op_of(const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  if (Op* op = known_op(&schema)) return op;
  auto made = std::make_unique<Op>();
  made->key = &schema;
  {
    std::lock_guard<std::mutex> guard(ops_lock);
    made->id = ops_made++;
  }
  describe(*made, schema.name().c_str(), schema.overload_name().c_str());
  made->arguments = static_cast<int32_t>(schema.arguments().size());
  made->returns = static_cast<int32_t>(schema.returns().size());
  for (const auto& argument : schema.arguments()) {
    if (!argument.kwarg_only()) made->positional++;
    made->each.push_back(argument_of(argument));
  }
  std::lock_guard<std::mutex> guard(ops_lock);
  if (Op* op = known_op(&schema)) return op;  // another thread was faster
  auto& place = place_of(&schema);
  made->next = place.load(std::memory_order_relaxed);
  place.store(made.get(), std::memory_order_release);
  return made.release();
}

// Registrations live until the process ends, also during its exit.
void keep(c10::RegistrationHandleRAII handle) {
  static auto* const kept = new std::vector<c10::RegistrationHandleRAII>();
  kept->push_back(std::move(handle));
}

// Deregistering an op (a destroyed torch::Library) frees its schema, whose address may be reused by the next op.
struct Forgets final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& handle) override {
    if (!handle.hasSchema()) return;
    std::lock_guard<std::mutex> guard(ops_lock);
    std::atomic<Op*>* place = &place_of(&handle.schema());
    for (Op* op = place->load(); op; place = &op->next, op = place->load())
      if (op->key == &handle.schema()) return place->store(op->next.load());  // not freed: a call of it may be in progress
  }
};

// ------------------------------------------------------------------------------------------------------------ digests

// Larger contents are hashed by pieces (hashbench/trace/digest.py, `hash_memory`), possibly in parallel.
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

// -------------------------------------------------------------------------------------------- non-tensor arguments

void put(std::string& text, char tag, const void* data, size_t size) {
  text.push_back(tag);
  text.append(static_cast<const char*>(data), size);
}

template <typename List>
void put_list(std::string& text, char tag, const List& list) {
  const auto count = static_cast<int64_t>(list.size());
  put(text, tag, &count, 8);
  for (const auto& item : list) text.append(reinterpret_cast<const char*>(&item), sizeof(item));
}

bool is_no_tensor(const c10::IValue& value) { return !value.isTensor() || !value.toTensor().defined(); }

// A Python number where the schema has a tensor.
bool is_number(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

// Read by hashbench/trace/native/decode.py, `_Values`.
void put_value(std::string& text, int64_t value) { put(text, 'i', &value, 8); }
void put_value(std::string& text, double value) { put(text, 'd', &value, 8); }
void put_value(std::string& text, bool value) { text.push_back(value ? 't' : 'f'); }
void put_value(std::string& text, at::IntArrayRef value) { put_list(text, 'I', value); }
void put_value(std::string& text, const c10::IValue& value) {
  if (value.isInt()) {
    put_value(text, value.toInt());
  } else if (value.isDouble()) {
    put_value(text, value.toDouble());
  } else if (value.isBool()) {
    put_value(text, value.toBool());
  } else if (value.isTensor() && value.toTensor().defined()) {
    const void* data = value.toTensor().const_data_ptr();
    switch (value.toTensor().scalar_type()) {
      case at::kLong: return put_value(text, *static_cast<const int64_t*>(data));
      case at::kDouble: return put_value(text, *static_cast<const double*>(data));
      case at::kBool: return put_value(text, *static_cast<const bool*>(data));
      case at::kComplexDouble: return put_value(text, *static_cast<const c10::complex<double>*>(data));
      default: text.push_back('n');
    }
  } else if (value.isNone() || value.isTensor()) {
    text.push_back('n');
  } else if (value.isIntList()) {
    const auto list = value.toListRef();
    const auto count = static_cast<int64_t>(list.size());
    put(text, 'I', &count, 8);
    for (const auto& item : list) {
      const int64_t v = item.toInt();
      text.append(reinterpret_cast<const char*>(&v), 8);
    }
  } else if (value.isDoubleList()) {
    put_list(text, 'D', value.toDoubleVector());
  } else if (value.isString()) {
    const auto v = value.toStringView();
    const auto count = static_cast<int64_t>(v.size());
    put(text, 's', &count, 8);
    text.append(v.data(), v.size());
  } else if (value.isComplexDouble()) {
    const auto v = value.toComplexDouble();
    put(text, 'c', &v, 16);
  } else if (value.isDevice()) {
    const auto v = value.toDevice().str();
    const auto count = static_cast<int64_t>(v.size());
    put(text, 'v', &count, 8);
    text.append(v);
  } else if (value.isList()) {
    const auto list = value.toListRef();
    int64_t count = 0;
    for (const auto& item : list) count += is_no_tensor(item);
    put(text, 'L', &count, 8);
    for (const auto& item : list)
      if (is_no_tensor(item)) put_value(text, item);
  } else {
    const auto v = value.isGenerator() ? std::string("Generator") : value.tagKind();
    const auto count = static_cast<int64_t>(v.size());
    put(text, '?', &count, 8);
    text.append(v);
  }
}

[[gnu::hot]] bool is_default(const Argument& argument, at::IntArrayRef value) {
  return argument.usual == Argument::kOther && argument.value->isIntList() && value.equals(argument.value->toIntVector());
}
[[gnu::hot, gnu::noinline]] bool is_default(const Argument& argument, const c10::IValue& value) {
  switch (argument.usual) {
    case Argument::kNothing: return false;
    case Argument::kNone: return value.isNone();
    case Argument::kInt: return value.isInt() && value.toInt() == argument.integer;
    case Argument::kDouble: return value.isDouble() && value.toDouble() == argument.number;
    case Argument::kBool: return value.isBool() && value.toBool() == (argument.integer != 0);
    case Argument::kOther: return !value.isNone() && !value.isTensor() && value == *argument.value;
  }
  return false;
}

// ----------------------------------------------------------------------------------------------------------- one call

// A call may end and free its trace: the recorder lives until no call is in progress.
struct UnderWay {
  Recorder& recorder;
  bool counted = false, last = false;

  void begin() {  // both under the recorder's lock
    recorder.calls++;
    counted = true;
  }
  void end() {
    counted = false;
    last = !--recorder.calls && recorder.dropped;
  }
  ~UnderWay() {
    if (counted) {
      Guard guard(recorder.lock);
      end();
    }
    if (last) delete &recorder;
  }
};

// Thread-local dispatch keys. The address is cached per thread: looking it up is a call, and torch's setters are not inlined.
using ThreadKeys = c10::impl::PODLocalDispatchKeySet;
ThreadKeys& keys_here() { return c10::impl::raw_local_dispatch_key_set; }

// True if this thread's calls reach the recorder.
[[gnu::hot]] void set_seen(bool seen, ThreadKeys& keys = keys_here()) {
  keys.set_included(seen ? keys.included().add(kKey) : keys.included().remove(kKey));
}

// Turns recording off while a call is processed, and in kernels whose inner calls are not recorded.
struct Quiet {
  Quiet() : Quiet(keys_here()) { begin(); }
  explicit Quiet(ThreadKeys& keys) : keys(keys) {}  // not yet
  void begin() {
    if (!off) set_seen(false, keys);
    off = true;
  }
  ~Quiet() {  // the call may have ended its trace
    if (off && current.load(std::memory_order_relaxed)) set_seen(true, keys);
  }
  Quiet(const Quiet&) = delete;
  ThreadKeys& keys;
  bool off = false;
};

// Guards that restore the thread's state after a call are unaware that the call ended the trace.
struct Ended {
  ~Ended() {
    if (!current.load(std::memory_order_relaxed)) set_seen(false);
  }
};

// Whatever has a Python dispatch of its own in a forwarded call: modes (up to torch 2.14) and tensor subclasses. For these torch
// looks up a kernel registered from Python by operator name (`python_op_registration_trampoline`), which finds no fallback, so
// they are hidden while Python runs and back in place for the kernel.
struct PythonDispatch {
  using Modes = c10::impl::TorchDispatchModeTLS;
  const bool any = Modes::any_modes_set();
  Modes modes;                       // the other state, while `any`
  std::vector<at::Tensor> subclass;  // arguments

  bool empty() const { return !any && subclass.empty(); }
  void swap(bool visible) {
    for (const at::Tensor& tensor : subclass) tensor.unsafeGetTensorImpl()->set_python_dispatch(visible);
    if (!any) return;
    Modes current = Modes::get_state();
    Modes::set_state(std::exchange(modes, std::move(current)));
  }
};

// Scope in which what dispatches to Python is hidden, or visible again.
struct Swapped {
  PythonDispatch& dispatch;
  const bool visible;
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();  // `set_state` changes them

  Swapped(PythonDispatch& dispatch, bool visible) : dispatch(dispatch), visible(visible) {
    if (!dispatch.empty()) dispatch.swap(visible);
  }
  Swapped(const Swapped&) = delete;
  ~Swapped() {
    if (dispatch.empty()) return;
    dispatch.swap(!visible);
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
};

// A call forwarded to Python. Python receives aliases of plain tensors: a Python object of the tensor, or of its storage,
// would raise its use count, on which autograd branches later.
struct Handed {
  Recorder& recorder;
  const Op& op;
  const c10::OperatorHandle& handle;
  c10::DispatchKeySet keys;
  c10::Stack* stack;
  c10::impl::LocalDispatchKeySet entry;  // the thread's keys when the call arrived
  PythonDispatch dispatch;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // original, alias
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;
};

// Scope of a callback into Python. Garbage collection is disabled, so that finalizers run after the call. Program code that
// runs anyway (signal handlers; a collection that Python 3.12 has scheduled) goes through `fallback`.
struct Scratch;
struct InPython {
  Scratch& scratch;
  const c10::impl::LocalDispatchKeySet keys;  // the program's keys
  const InPython* const outer;
  const bool has_gil;
  const bool collects;  // enabled by the program

  explicit InPython(bool has_gil);
  InPython(const InPython&) = delete;
  ~InPython();
};

struct Scratch {
  ThreadKeys* keys = &keys_here();
  uint64_t thread = at::RecordFunction::currentThreadId();
  Recorder* owner = nullptr;  // of this thread's lane; null: main thread, any trace
  uint64_t entered = 0;       // number of the trace entered in this thread
  uint32_t lane = 0;
  uint32_t context = 0;
  std::string others;
  Handed* handed = nullptr;  // to Python
  const InPython* python = nullptr;  // callback scope; null also while program code runs inside it
  int32_t open = 0;               // calls in progress whose inner calls are recorded
  std::vector<int32_t> children;  // inner records without a parent yet
  std::vector<int32_t> lanes;     // lanes started inside them
  struct Unnamed {
    const at::Tensor* tensor;  // an argument of the call
    int32_t node, name;  // candidate name
  };
  std::vector<Unnamed> unnamed;
};
constinit thread_local Scratch* scratch_here = nullptr;

// A thread-local pointer is trivially initialized, so an access needs no init check.
[[gnu::noinline]] Scratch& made_scratch() {
  struct Kept {
    ~Kept() { delete std::exchange(scratch_here, nullptr); }
  };
  thread_local Kept kept;
  (void)&kept;
  return *(scratch_here = new Scratch());
}
Scratch& this_thread() { return scratch_here ? *scratch_here : made_scratch(); }

[[gnu::hot]] uint32_t context_of(const Recorder& recorder, const Scratch& scratch) {
  return scratch.owner ? scratch.context : recorder.context.load(std::memory_order_relaxed);
}

// Autograd's sequence numbers are per thread.
[[gnu::hot]] int64_t in_thread(const Recorder& recorder, int64_t sequence, uint64_t thread) {
  return thread == recorder.thread ? sequence : sequence | static_cast<int64_t>(thread) << 40;
}

// True if this thread started the lane, or an ancestor of it, after its first `first` lanes.
bool started_since(Recorder& recorder, const Scratch& scratch, int32_t lane, size_t first) {
  for (; lane; lane = recorder.lanes[static_cast<size_t>(lane)].parent)
    for (size_t i = first; i < scratch.lanes.size(); i++)
      if (scratch.lanes[i] == lane) return true;
  return false;
}

// Sets this record as the caller of the lanes that this thread started after its first `first` ones.
void close_lanes(Recorder& recorder, Scratch& scratch, size_t first, int32_t number) {
  for (size_t i = first; i < scratch.lanes.size(); i++) recorder.lanes[static_cast<size_t>(scratch.lanes[i])].caller = number;
  scratch.lanes.resize(first);
}

// The keys before autograd's kernel, which has excluded its own. Those of autocast and of modes stay excluded: their earlier
// state is unknown.
c10::impl::LocalDispatchKeySet program_keys() {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = keys.included_.add(kKey);
  if (c10::InferenceMode::is_enabled()) return keys;
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  keys.included_ = keys.included_.add(c10::DispatchKey::ADInplaceOrView);
  return keys;
}

// Enables or disables Python's automatic garbage collection; returns the previous state.
bool set_collects(bool collects) {
  const int gil = PyGILState_Ensure();
  const bool before = collects ? PyGC_Enable() : PyGC_Disable();
  PyGILState_Release(gil);
  return before;
}

InPython::InPython(bool has_gil)
    : scratch(this_thread()), keys(scratch.python ? scratch.python->keys : program_keys()),
      outer(std::exchange(scratch.python, this)), has_gil(has_gil), collects(has_gil ? PyGC_Disable() : set_collects(false)) {}
InPython::~InPython() {
  if (collects) has_gil ? static_cast<void>(PyGC_Enable()) : static_cast<void>(set_collects(true));
  scratch.python = outer;
}

void describe(Op& op, const char* name, const char* overload) {
  const InPython asking(false);
  const int gil = PyGILState_Ensure();
  plan_of(op.id, name, overload, &op.plan);
  PyGILState_Release(gil);
}

// Scope in which program code, or a kernel, runs inside a callback, with these keys.
struct InProgram {
  Scratch& scratch = this_thread();
  Handed* const handed = std::exchange(scratch.handed, nullptr);
  const InPython* const python = std::exchange(scratch.python, nullptr);
  c10::impl::ForceDispatchKeyGuard guard;

  explicit InProgram(const c10::impl::LocalDispatchKeySet& keys) : guard(keys) {
    if (python->collects) set_collects(true);
  }
  InProgram(const InProgram&) = delete;
  ~InProgram() {
    if (python->collects) set_collects(false);
    scratch.python = python;
    scratch.handed = handed;
  }
};

// Scope with recording on for this thread, also inside a callback made without a call.
struct Seen {
  ThreadKeys& keys = keys_here();
  const bool before = keys.included().has(kKey);

  Seen() { set_seen(true, keys); }
  Seen(const Seen&) = delete;
  ~Seen() { set_seen(before, keys); }
};

template <typename Result, typename... More>
Result ask(Result (*question)(_object*, More...), Result otherwise, const at::Tensor& tensor, More... more) {
  const Seen seen;
  const int gil = PyGILState_Ensure();
  const Result answer = [&] {
    const InPython asking(true);
    _object* object = THPVariable_Wrap(tensor);
    const Result given = object ? question(object, more...) : otherwise;
    if (object) Py_DecRef(object);
    return given;
  }();
  PyGILState_Release(gil);
  return answer;
}

c10::Storage shown(Handed& call, const c10::Storage& storage) {
  for (const auto& [original, copy] : call.storages)
    if (original.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return copy;
  // The alias owns the memory, so that Python's references stay valid.
  auto owner = std::make_unique<c10::Storage>(storage);
  c10::DataPtr memory(storage.data_ptr().get(), owner.get(), [](void* kept) { delete static_cast<c10::Storage*>(kept); },
                      storage.device());
  owner.release();
  c10::Storage copy(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                          std::move(memory), nullptr, false));
  call.storages.emplace_back(storage, copy);
  return copy;
}

at::Tensor shown(Recorder& recorder, Handed& call, const at::Tensor& tensor, bool output = false) {
  if (!tensor.defined() || call.op.plan.originals || !is_plain(recorder, tensor) || is_number(tensor)) return tensor;
  for (const auto& [original, copy] : call.tensors)
    if (original.is_same(tensor)) return copy;
  if (!recorder.nothing_recorded) {
    c10::StorageImpl* storage = storage_of(tensor);
    Guard guard(recorder.lock);
    const auto* entry = recorder.writers.find(storage);
    const bool whole = output || (tensor.nbytes() >= storage->nbytes() && tensor.is_contiguous());
    if (entry ? entry->python : !whole) return tensor;  // Python's state is an attribute of the storage
  }
  at::Tensor copy = at::detail::make_tensor<c10::TensorImpl>(shown(call, tensor.storage()), tensor.key_set(), tensor.dtype());
  copy.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  call.tensors.emplace_back(tensor, copy);
  return copy;
}

c10::IValue shown(Recorder& recorder, Handed& call, const c10::IValue& value, bool output = false) {
  if (value.isTensor()) return shown(recorder, call, value.toTensor(), output);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(shown(recorder, call, tensor, output));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(shown(recorder, call, *tensor)) : std::nullopt);
    return list;
  }
  return value;
}

// The op `hashbench::make`, by which Python makes the forwarded call: a separate op, so that no other call (of a signal
// handler) is mistaken for it. It returns aliases of the outputs.
void make(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack* stack) {
  TORCH_CHECK(this_thread().handed, "hashbench::make is called where no call was handed over");
  Handed& call = *this_thread().handed;
  {
    const Swapped visible(call.dispatch, true);
    const InProgram kernel(call.entry);
    call.handle.redispatchBoxed(call.keys & kAfter, call.stack);
  }
  for (auto& [original, copy] : call.tensors) {  // an `out` was resized
    c10::StorageImpl* storage = storage_of(original);
    c10::StorageImpl* other = storage_of(copy);
    if (storage->data_ptr().get() != other->data_ptr().get() || storage->nbytes() != other->nbytes()) {
      std::erase_if(call.storages, [&](const auto& pair) { return pair.second.unsafeGetStorageImpl() == other; });
      copy.unsafeGetTensorImpl()->set_storage_keep_dtype(shown(call, original.storage()));
    }
    if (copy.sizes() != original.sizes() || copy.strides() != original.strides())
      copy.unsafeGetTensorImpl()->set_sizes_and_strides(original.sizes(), original.strides(), original.storage_offset());
  }
  std::vector<c10::IValue> outputs;
  for (size_t i = call.stack->size() - static_cast<size_t>(call.op.returns); i < call.stack->size(); i++) {
    const c10::IValue& value = (*call.stack)[i];
    const bool none = value.isTensor() && !value.toTensor().defined();  // not allowed in a tuple
    outputs.push_back(none ? c10::IValue() : shown(call.recorder, call, value, true));
  }
  if (outputs.empty()) stack->emplace_back();
  else if (outputs.size() == 1) stack->push_back(std::move(outputs[0]));
  else stack->emplace_back(c10::ivalue::Tuple::create(std::move(outputs)));
}

// True if a value is, or contains, a tensor without data, or names the meta device: a placeholder. With modes disabled, a
// fake tensor is recognized by its device alone.
bool has_no_content(const c10::IValue& value, bool modes_off) {
  if (value.isDevice()) return modes_off && value.toDevice().is_meta();
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return false;
    if (modes_off && tensor.is_meta()) return true;
    return tensor.key_set().has(c10::DispatchKey::Python) && !ask(has_data, 1, tensor);
  }
  if (!value.isList() || value.isIntList() || value.isDoubleList() || value.isBoolList()) return false;
  const auto items = value.toListRef();
  return std::any_of(items.begin(), items.end(), [&](const c10::IValue& item) { return has_no_content(item, modes_off); });
}

// True if Python inspects a value without calling an op. If a call has only such values, ops that arrive during its callback
// are the program's; ops of our Python code run in `unrecorded` (hashbench/native/library.py).
bool is_plain(const Recorder& recorder, const c10::IValue& value) {
  if (value.isTensor()) return !value.toTensor().defined() || is_number(value.toTensor()) || is_plain(recorder, value.toTensor());
  if (value.isDevice()) return value.toDevice().is_cpu();
  if (value.isGenerator()) return value.toGenerator().device().is_cpu();
  if (!value.isList()) return !value.isObject();
  const auto items = value.toListRef();
  return std::all_of(items.begin(), items.end(), [&](const c10::IValue& item) { return is_plain(recorder, item); });
}

void add_subclass(PythonDispatch& dispatch, const c10::IValue& value) {
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python)) dispatch.subclass.push_back(tensor);
  };
  if (value.isTensor()) add(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) add(*tensor);
}

// Calls Python with every key above the kernel excluded; Python calls `make`.
void record_in_python(Recorder& recorder, const Op& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, c10::Stack* stack) {
  const bool modes_off = c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::Python);
  {
    Quiet quiet;
    const auto is_later = [&](const c10::IValue& value) { return has_no_content(value, modes_off); };
    if (std::any_of(stack->end() - op.arguments, stack->end(), is_later)) {
      handle.redispatchBoxed(keys & kAfter, stack);
      return;
    }
  }
  const auto arrived = stack->end() - op.arguments;
  const bool calls_no_op = !op.plan.python &&
      std::all_of(arrived, stack->end(), [&](const c10::IValue& value) { return is_plain(recorder, value); });
  Ended ended;
  Handed call{recorder, op, handle, keys, stack, c10::impl::tls_local_dispatch_key_set(), {}, {}, {}};
  if (!op.plan.open) call.entry.included_ = call.entry.included_.remove(kKey);
  c10::Stack arguments;
  for (size_t i = stack->size() - static_cast<size_t>(op.arguments); i < stack->size(); i++) {
    add_subclass(call.dispatch, (*stack)[i]);
    arguments.push_back(shown(recorder, call, (*stack)[i]));
  }
  Scratch& scratch = this_thread();
  const InPython looking(false);
  Handed* outer = std::exchange(scratch.handed, &call);
  const auto children = scratch.children.size(), lanes = scratch.lanes.size();
  const auto opened = scratch.open;
  try {
    const Swapped hidden(call.dispatch, false);
    c10::impl::ExcludeDispatchKeyGuard quiet(calls_no_op ? kNotAfter.remove(kKey) : kNotAfter);
    handle.redispatchBoxed((keys & kAfter) | c10::DispatchKeySet(kPythonKey), &arguments);
  } catch (...) {
    scratch.handed = outer;
    scratch.open = opened;
    scratch.children.resize(children);
    scratch.lanes.resize(lanes);
    recorder.failed = op.id;
    throw;
  }
  scratch.handed = outer;
}

void name_leaves(Recorder& recorder, Scratch& scratch) {
  std::vector<Scratch::Unnamed> unnamed;  // an op that interrupts the callback may read other leaves
  unnamed.swap(scratch.unnamed);
  for (const auto& [tensor, node, name] : unnamed) {
    const int32_t answer = ask(classify, -1, *tensor, name);
    Guard guard(recorder.lock);
    recorder.leaves[static_cast<size_t>(-1 - node)].name = answer;
  }
  unnamed.clear();
  unnamed.swap(scratch.unnamed);
}

// Some decomposing ops have backend kernels: `silu_backward` on the CPU.
bool has_own_kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet keys) {
  return handle.hasKernelForDispatchKey((keys & kAfter).highestPriorityTypeId());
}

// One recorded call, from its arrival to its record. It copies no tensor under the lock: for a tensor owned by Python alone
// that takes the GIL.
struct Call {
  Recorder& recorder;
  Scratch& scratch;
  const Op& op;
  const bool backward;
  const size_t outer = scratch.children.size(), outer_lanes = scratch.lanes.size();
  UnderWay under_way{recorder};
  std::unique_lock<Lock> lock{recorder.lock, std::defer_lock};
  Quiet quiet{*scratch.keys};
  uint64_t written = op.plan.written;
  c10::SmallVector<const at::Tensor*, 4> targets;
  c10::SmallVector<c10::StorageImpl*, 8> given;
  c10::SmallVector<Read, 8> reads;
  c10::SmallVector<const at::Tensor*, 4> wrote;
  at::Generator generator;
  std::string scalar;  // non-tensor output
  int last = 0;        // positional arguments from here on have their defaults
  uint32_t others = 0;
  uint64_t rng = 0;
  int64_t sequence = 0;
  bool plain = true;  // else recorded by Python

  [[gnu::hot, gnu::noinline]] Call(Recorder& recorder, Scratch& scratch, const Op& op, bool backward)
      : recorder(recorder), scratch(scratch), op(op), backward(backward) {}

  // Adds one argument; under the recorder's lock.
  [[gnu::hot, gnu::noinline]] void begin() {
    lock.lock();
    under_way.begin();
    scratch.others.clear();
  }
  // Adds one tensor argument with its last writer. False if Python must record the call.
  [[gnu::hot]] bool read(const at::Tensor& tensor, int32_t argument) {
    if (!is_plain(recorder, tensor)) return false;
    c10::StorageImpl* storage = storage_of(tensor);
    given.push_back(storage);
    int32_t node;
    if (const auto* entry = recorder.writers.find(storage)) {
      if (entry->python) return false;
      node = entry->node;
    } else {
      if (tensor.nbytes() < storage->nbytes() || !tensor.is_contiguous()) return false;  // part of a leaf
      node = new_leaf(tensor, storage);
    }
    reads.push_back({node, argument, tensor.storage_offset()});
    return true;
  }
  [[gnu::hot, gnu::noinline]] int32_t new_leaf(const at::Tensor& tensor, c10::StorageImpl* storage) {
    const int32_t node = -1 - static_cast<int32_t>(recorder.leaves.count);
    bool certain;
    const int32_t name = recorder.names.of(tensor.unsafeGetTensorImpl(), certain);
    if (!certain) scratch.unnamed.push_back({&tensor, node, name});
    recorder.leaves.push({reinterpret_cast<uint64_t>(storage), digest(recorder, tensor),
                          static_cast<int64_t>(recorder.records.count), meta_of(recorder, tensor),
                          context_of(recorder, scratch), name, 0});
    recorder.writers.set(storage, node, 0);
    return node;
  }
  [[gnu::hot]] void add(const at::Tensor& tensor, int position, int index = 0) {
    plain = plain && read(tensor, position | index << 8);
    if (written >> position & 1) targets.push_back(&tensor);
  }
  template <typename T>
  bool is_told(int position, const T& value) const {
    return position < last || (position >= op.positional && !is_default(op.each[position], value));
  }
  std::string& text_of(int position) {
    scratch.others.push_back(static_cast<char>(position));
    return scratch.others;
  }
  [[gnu::hot, gnu::noinline]] void add(const c10::IValue& value, int position) {
    if (value.isTensor() && value.toTensor().defined() && !is_number(value.toTensor())) {
      add(value.toTensor(), position);
      return;
    }
    const Argument& argument = op.each[position];
    bool told = is_told(position, value);
    if (argument.lists &&
        (value.isTensorList() || (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()))) {
      int index = 0;
      int tensors = 0;
      for (const c10::IValue& item : value.toListRef()) {
        index++;
        if (is_no_tensor(item)) continue;
        tensors++;
        add(item.toTensor(), position, index);
        if (!plain) break;
      }
      told = told && (!index || tensors < index);
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      plain = plain && generator.device().is_cpu();
    } else if (value.isDevice()) {
      plain = plain && value.toDevice().is_cpu();
    } else if (value.isSymInt() && !value.isInt()) {
      plain = false;
    }
    if (told) put_value(text_of(position), value);
  }
  [[gnu::hot, gnu::noinline]] void add_tensor(const at::Tensor& tensor, int position) {
    if (tensor.defined() && !is_number(tensor)) [[likely]] add(tensor, position);
    else add(c10::IValue(tensor), position);
  }
  [[gnu::hot, gnu::noinline]] void add(at::IntArrayRef value, int position) {
    if (is_told(position, value)) put_value(text_of(position), value);
  }
  // After all arguments: queries to Python and generators, without the lock, last before the kernel. False if Python must
  // record the call.
  [[gnu::hot, gnu::noinline]] bool end_arguments(const torch::autograd::Node* node) {
    if (plain && !scratch.others.empty()) others = recorder.others.number(hash, scratch.others);
    recorder.records.fetch();
    recorder.reads.fetch();
    recorder.writes.fetch();
    lock.unlock();
    if (!scratch.unnamed.empty() || (plain && op.plan.seeded)) {
      Quiet asking;
      name_leaves(recorder, scratch);
      if (plain && op.plan.seeded) rng = generator_digest(generator);
    }
    if (!plain) return false;
    sequence = node ? in_thread(recorder, static_cast<int64_t>(node->sequence_nr()), node->thread_id())
                    : in_thread(recorder, static_cast<int64_t>(at::sequence_number::peek()) - 1, scratch.thread);
    if (!op.plan.open) quiet.begin();
    return true;
  }
  // Drops the record.
  [[gnu::cold]] void undo() {
    scratch.children.resize(outer);
    scratch.lanes.resize(outer_lanes);
  }
  [[gnu::cold]] void failed() {
    undo();
    recorder.failed = op.id;
  }

  // Adds one output, which must stay in place until the call is recorded.
  [[gnu::hot, gnu::noinline]] void output(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    for (const auto* target : targets)
      if (target->is_same(tensor)) return;
    if (!op.plan.fresh && tensor.has_storage()) {
      const auto* storage = storage_of(tensor);
      for (const auto* one : given)
        if (one == storage) return;
      Guard guard(recorder.lock);
      if (recorder.writers.find(storage)) return;
    }
    wrote.push_back(&tensor);
  }
  void output(const c10::IValue& value) {
    if (value.isTensor()) output(value.toTensor());
    else if (value.isTensorList())
      for (const c10::IValue& item : value.toListRef()) output(item.toTensor());
    else if (op.returns == 1) put_value(scalar, value);
  }
  // True if an inner call is the last writer of exactly this: returned, not written, by this call.
  bool is_shown(const c10::StorageImpl* storage, uint64_t digest, uint32_t meta) {
    if (scratch.children.size() == outer && scratch.lanes.size() == outer_lanes) return false;
    const auto* entry = recorder.writers.find(storage);
    if (!entry || entry->python || entry->node < 0) return false;
    const Record& child = recorder.records[static_cast<size_t>(entry->node)];
    bool inside = started_since(recorder, scratch, static_cast<int32_t>(child.lane), outer_lanes);
    for (size_t c = outer; c < scratch.children.size() && !inside; c++) inside = scratch.children[c] == entry->node;
    for (size_t w = 0; inside && child.op >= 0 && w < child.writes; w++) {
      const Write& write = recorder.writes[child.first_write + w];
      if (write.state == 0 && write.digest == digest && write.meta == meta) return true;
    }
    return false;
  }
  // Recording of this thread is off.
  [[gnu::hot, gnu::noinline]] void record() {
    quiet.begin();
    wrote.append(targets.begin(), targets.end());
    struct Content {
      uint64_t digest;
      bool plain;
    };
    c10::SmallVector<Content, 4> contents;
    for (const auto* tensor : wrote) {
      const bool plain = is_plain(recorder, *tensor);
      contents.push_back({plain && !op.plan.blank ? digest(recorder, *tensor) : 0, plain});
    }
    c10::SmallVector<std::pair<at::Tensor, size_t>, 1> odd;
    int32_t number;
    {
      Guard guard(recorder.lock);
      if (recorder.over) return undo();
      number = static_cast<int32_t>(recorder.records.count);
      Record record{};
      record.rng = rng;
      record.op = op.id;
      record.others = others;
      record.parent = -1;
      record.context = context_of(recorder, scratch) | (backward ? 1u << 31 : 0);
      record.lane = scratch.lane;
      record.sequence = sequence;
      record.first_read = static_cast<uint32_t>(recorder.reads.count);
      record.first_write = static_cast<uint32_t>(recorder.writes.count);
      for (const Read& read : reads) recorder.reads.push(read);
      record.reads = static_cast<uint32_t>(reads.size());
      for (size_t i = outer; i < scratch.children.size(); i++)
        recorder.records[static_cast<size_t>(scratch.children[i])].parent = number;
      for (size_t i = 0; i < wrote.size(); i++) {
        const at::Tensor& tensor = *wrote[i];
        if (!contents[i].plain) {
          odd.emplace_back(tensor, recorder.writes.count);
          recorder.writes.push({0, 0, 2});
        } else {
          const uint32_t meta = meta_of(recorder, tensor);
          if (is_shown(storage_of(tensor), contents[i].digest, meta)) continue;
          recorder.writes.push({contents[i].digest, meta, op.plan.blank});
          recorder.writers.set(storage_of(tensor), number, 0);
        }
        record.writes++;
      }
      record.scalar = scalar.empty() ? 0 : 1 + recorder.others.number(hash, scalar);
      recorder.records.push(record);
      if (scratch.children.size() > outer) scratch.children.resize(outer);
      if (scratch.lanes.size() > outer_lanes) close_lanes(recorder, scratch, outer_lanes, number);
      if (odd.empty()) under_way.end();
    }
    if (scratch.open) scratch.children.push_back(number);
    for (const auto& [tensor, place] : odd) {
      const uint32_t at = ask(digest_odd, 0u, tensor, number, static_cast<int32_t>(op.plan.blank));
      Guard guard(recorder.lock);
      recorder.writes[place].meta = at;
    }
  }
};

void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, c10::Stack* stack) {
  Scratch& scratch = this_thread();
  if (scratch.python) {  // program code that interrupts the callback: recorded like any other call
    const InProgram interrupting(scratch.python->keys);
    handle.callBoxed(stack);
    return;
  }
  Recorder* on = current.load(std::memory_order_acquire);
  if (!on) set_seen(false);  // the trace ended in another thread
  if (scratch.owner && scratch.owner != on) on = nullptr;  // this thread's trace is over
  Op* const op = on ? op_of(handle) : nullptr;
  if (on && on != current.load(std::memory_order_acquire)) on = nullptr;  // it ended while Python described the op
  if (!on || !op->plan.traced || (op->plan.decomposes && !has_own_kernel(handle, keys))) {
    handle.redispatchBoxed(keys & kAfter, stack);
    return;
  }
  Recorder& recorder = *on;
  const Plan& plan = op->plan;
  const auto node = torch::autograd::get_current_node();
  if (!node && !scratch.owner && scratch.entered != recorder.trace) {  // a backend's thread, with its client's state
    handle.redispatchBoxed(keys & kAfter, stack);
    return;
  }
  Call call{recorder, scratch, *op, node != nullptr};
  if (plan.python || recorder.everything_python || (node && recorder.backward_python.load(std::memory_order_relaxed))) {
    {
      Guard guard(recorder.lock);
      call.under_way.begin();
    }
    record_in_python(recorder, *op, handle, keys, stack);
    return;
  }

  const size_t base = stack->size() - static_cast<size_t>(op->arguments);
  call.begin();
  if (plan.statistics && (plan.training < 0 || ((*stack)[base + plan.training].isBool() && (*stack)[base + plan.training].toBool())))
    call.written |= plan.statistics;
  int& last = call.last = op->positional;
  while (last > 0 && is_default(op->each[last - 1], (*stack)[base + last - 1])) last--;
  for (int position = 0; call.plain && position < op->arguments; position++) call.add((*stack)[base + position], position);
  if (!call.end_arguments(node.get())) {
    record_in_python(recorder, *op, handle, keys, stack);
    return;
  }
  c10::SmallVector<at::Tensor, 4> held;  // the kernel pops its arguments
  held.reserve(call.targets.size());
  for (const auto*& target : call.targets) target = &held.emplace_back(*target);
  scratch.open += plan.open;
  try {
    handle.redispatchBoxed(keys & kAfter, stack);
  } catch (...) {
    scratch.open -= plan.open;
    call.failed();
    throw;
  }
  scratch.open -= plan.open;
  for (size_t i = stack->size() - static_cast<size_t>(op->returns); i < stack->size(); i++) call.output((*stack)[i]);
  call.record();
}

// ------------------------------------------------------------------------------------------------------ unboxed calls

// The trace that records a call of this thread unboxed; null: `fallback` decides.
[[gnu::hot]] Recorder* recorder_of(const Scratch& scratch, const torch::autograd::Node* node) {
  Recorder* on = current.load(std::memory_order_acquire);
  if (!on || scratch.python || (scratch.owner && scratch.owner != on) || on->everything_python) return nullptr;
  if (node ? on->backward_python.load(std::memory_order_relaxed) : !scratch.owner && scratch.entered != on->trace) return nullptr;
  return on;
}

// Calls `use` with an argument in the form of `Call::add` and `is_default`: lists unchanged, all others as IValues.
template <typename Use, typename T>
decltype(auto) simply(const Use& use, const T& value) {
  if constexpr (std::is_same_v<T, c10::SymIntArrayRef>) {
    if (const auto plain = c10::asIntArrayRefSlowOpt(value)) return use(*plain);
  } else if constexpr (std::is_same_v<T, at::OptionalIntArrayRef>) {
    if (value) return use(*value);
  } else if constexpr (std::is_same_v<T, at::IntArrayRef>) {
    return use(value);
  }
  return use(c10::IValue(value));
}

template <typename Schema>
class Unboxed;

// Unboxed kernel of one op at the recorder's key, with the signature of its C++ function: use counts stay the same, and
// nothing is boxed. Calls that are not recorded here, or are less simple, go to `fallback`. Ops with one signature share
// code, most of which has left the cache at the next call.
template <typename Result, typename... Args>
class Unboxed<Result(Args...)> final : public c10::OperatorKernel {
  template <typename T>
  static constexpr bool kList = std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef> ||
      std::is_same_v<T, c10::List<std::optional<at::Tensor>>>;
  static_assert(!(kList<std::decay_t<Args>> || ...), "a value made of a list would go before its tensors are named");
  using Redispatch = Result (*)(c10::DispatchKeySet, Args...);
  const c10::OperatorHandle handle;
  const Redispatch redispatch;
  std::atomic<const Op*> known{nullptr};

 public:
  Unboxed(c10::OperatorHandle handle, Redispatch redispatch) : handle(std::move(handle)), redispatch(redispatch) {}

  [[gnu::hot, gnu::always_inline]] inline Result operator()(c10::DispatchKeySet keys, Args... args) {
    Scratch& scratch = this_thread();
    const Op* op = known.load(std::memory_order_acquire);
    if (op) op->fetch();
    const auto node = torch::autograd::get_current_node();
    Recorder* on = op ? recorder_of(scratch, node.get()) : nullptr;
    if (!on) return boxed(keys, std::forward<Args>(args)...);
    Call call{*on, scratch, *op, node != nullptr};
    call.begin();
    add(call, std::index_sequence_for<Args...>(), args...);
    if (!call.end_arguments(node.get())) return boxed(keys, std::forward<Args>(args)...);
    Result result = [&]() -> Result {
      try {
        return redispatch(keys & kAfter, std::forward<Args>(args)...);
      } catch (...) {
        call.failed();
        throw;
      }
    }();
    if constexpr (std::is_same_v<std::decay_t<Result>, at::Tensor>) call.output(result);
    else std::apply([&](const auto&... each) { (call.output(each), ...); }, result);
    call.record();
    return result;
  }

 private:
  template <size_t... position>
  static void add(Call& call, std::index_sequence<position...>, const std::decay_t<Args>&... args) {
    const bool usual[] = {is_usual(call.op.each[position], args)...};
    call.last = call.op.positional;
    while (call.last > 0 && usual[call.last - 1]) call.last--;
    (add(call, position, args), ...);
  }
  template <typename T>
  static bool is_usual(const Argument& argument, const T& value) {
    if constexpr (std::is_same_v<T, at::Tensor>) return false;
    else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) return !value && argument.usual == Argument::kNone;
    else return simply([&](const auto& simple) { return is_default(argument, simple); }, value);
  }
  template <typename T>
  static void add(Call& call, int position, const T& value) {
    if constexpr (std::is_same_v<T, at::Tensor>) call.add_tensor(value, position);
    else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) value ? call.add_tensor(*value, position) : call.add(c10::IValue(), position);
    else simply([&](const auto& simple) { call.add(simple, position); }, value);
  }

  [[gnu::cold, gnu::noinline]] Result boxed(c10::DispatchKeySet keys, Args... args) {
    if (!known.load(std::memory_order_relaxed) && current.load()) {
      const Op* op = op_of(handle);
      const Plan& plan = op->plan;
      const bool other = plan.python || plan.open || plan.statistics || plan.decomposes || !plan.traced;
      if (!other) known.store(op, std::memory_order_release);
    }
    return c10::impl::BoxedKernelWrapper<Result(Args...)>::call(
        c10::BoxedKernel::makeFromFunction<&fallback>(), handle, keys, std::forward<Args>(args)...);
  }
};

}  // namespace

// Boxed calls go to `fallback` directly; torch would unbox them for the kernel, by code per signature.
template <typename Schema>
struct c10::impl::make_boxed_from_unboxed_functor<Unboxed<Schema>, false> {
  static void call(c10::OperatorKernel*, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, c10::Stack* stack) {
    fallback(handle, keys, stack);
  }
};

// As torch's own, but placed beside its callees: the linker groups functions marked hot, so a call touches few pages.
template <typename Schema, typename Result, typename... Args>
struct c10::impl::wrap_kernel_functor_unboxed_<Unboxed<Schema>, Result(c10::DispatchKeySet, Args...)> {
  [[gnu::hot]] static Result call(c10::OperatorKernel* kernel, c10::DispatchKeySet keys, Args... args) {
    return (*static_cast<Unboxed<Schema>*>(kernel))(keys, std::forward<Args>(args)...);
  }
};

namespace {

template <typename Of>
void register_unboxed() {
  using Kernel = Unboxed<typename Of::schema>;
  auto& dispatcher = c10::Dispatcher::singleton();
  auto kernel = std::make_unique<Kernel>(dispatcher.findSchemaOrThrow(Of::name, Of::overload_name), &Of::redispatch);
  keep(dispatcher.registerImpl({Of::name, Of::overload_name}, kKey, c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(std::move(kernel)),
                               c10::impl::CppSignature::make<typename Of::schema>(), nullptr, __FILE__));
}

template <typename... Of>
void register_each() {
  (register_unboxed<Of>(), ...);
}

// Ops whose kernels often take no longer than boxing the call.
void register_usual() {
  register_each<
      at::_ops::_reshape_alias, at::_ops::_softmax, at::_ops::_softmax_backward_data, at::_ops::_unsafe_view,
      at::_ops::add_Tensor, at::_ops::add__Tensor, at::_ops::addcdiv_, at::_ops::addcmul_, at::_ops::addmm,
      at::_ops::alias, at::_ops::as_strided, at::_ops::bernoulli__float, at::_ops::bmm, at::_ops::clone,
      at::_ops::copy_, at::_ops::detach, at::_ops::div_Scalar, at::_ops::div_Tensor, at::_ops::div__Scalar,
      at::_ops::div__Tensor, at::_ops::embedding, at::_ops::embedding_dense_backward, at::_ops::empty_like,
      at::_ops::expand, at::_ops::fill__Scalar, at::_ops::gelu, at::_ops::gelu_backward, at::_ops::hardsigmoid,
      at::_ops::hardsigmoid_backward, at::_ops::hardswish, at::_ops::hardswish_, at::_ops::hardswish_backward,
      at::_ops::lerp__Scalar, at::_ops::masked_fill_Scalar, at::_ops::max_pool2d_with_indices, at::_ops::mean_dim,
      at::_ops::mm, at::_ops::mul_Scalar, at::_ops::mul_Tensor, at::_ops::mul__Tensor, at::_ops::native_layer_norm,
      at::_ops::native_layer_norm_backward, at::_ops::neg, at::_ops::permute, at::_ops::pow_Tensor_Scalar,
      at::_ops::relu, at::_ops::relu_, at::_ops::rsqrt, at::_ops::select_int, at::_ops::sigmoid,
      at::_ops::sigmoid_backward, at::_ops::silu, at::_ops::silu_backward, at::_ops::slice_Tensor, at::_ops::sqrt,
      at::_ops::squeeze_dim, at::_ops::sub_Tensor, at::_ops::sum_dim_IntList, at::_ops::t, at::_ops::tanh,
      at::_ops::tanh_backward, at::_ops::threshold_backward, at::_ops::transpose_int, at::_ops::unsqueeze,
      at::_ops::view, at::_ops::where_self, at::_ops::zero_>();
}

// --------------------------------------------------------------------------------------- constructors of tensor subclasses

struct MethodDef {  // PyMethodDef
  const char* name;
  Method method;
  int flags;
  const char* doc;
};

// torch constructs a tensor of a subclass from an op's output, an alias that writes nothing. If Python recorded that op, the
// output would already have a Python object, which torch refuses.
std::array<Method, 2> constructors{};

template <size_t which>
_object* constructed(_object* self, _object* args, _object* kwargs) {
  Quiet quiet(keys_here());
  if (c10::impl::tls_is_dispatch_key_included(kKey)) quiet.begin();
  return constructors[which](self, args, kwargs);
}

// ------------------------------------------------------------------------------------------------ Python functions

// The trace that records this thread, unless the thread is in a lane.
[[gnu::hot]] Recorder* followed(const Scratch& scratch) {
  Recorder* on = current.load(std::memory_order_relaxed);
  return on && scratch.entered == on->trace ? on : nullptr;
}

// Called before and after a module; same results as Python's `ModuleStack` (hashbench/trace/module_paths.py).
template <bool by_hook>
[[gnu::hot]] _object* enter_module(_object*, _object* module) {
  enum { kNotFollowed, kEntered, kUnknown, kTraced };
  const Scratch& scratch = this_thread();
  if (!by_hook && scratch.keys->included().has(c10::DispatchKey::Tracer)) return PyLong_FromLong(kTraced);
  Recorder* on = followed(scratch);
  if (!on) return PyLong_FromLong(kNotFollowed);
  if (!on->modules.enter(module)) return PyLong_FromLong(kUnknown);
  on->set_context();
  return PyLong_FromLong(kEntered);
}
[[gnu::hot]] _object* leave_module(_object*, _object* module) {
  if (Recorder* on = followed(this_thread())) {
    on->modules.leave(module);
    on->set_context();
  }
  return PyLong_FromLong(0);
}

}  // namespace

// ------------------------------------------------------------------------------------------------------ entry points

extern "C" {

// Ops of these two torch methods are not recorded. Their Python objects, and their class, are not modified.
void hb_let_construct(MethodDef* first, MethodDef* second) {
  constructors = {first->method, second->method};
  first->method = constructed<0>;
  second->method = constructed<1>;
}

// False if torch uses the key itself.
int hb_register() {
  try {
    keep(c10::Dispatcher::singleton().registerFallback(kKey, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), __FILE__));
    register_usual();
    keep(c10::Dispatcher::singleton().registerDef(torch::jit::parseSchema("hashbench::make() -> Any"), __FILE__));
    keep(c10::Dispatcher::singleton().registerImpl({"hashbench::make", ""}, std::nullopt, c10::KernelFunction::makeFromBoxedFunction<&make>(), std::nullopt, nullptr, __FILE__));
    return 1;
  } catch (const std::exception&) {
    return 0;
  }
}

void hb_prepare(void* hash_function, void* plan_function, void* classify_function, void* data_function, void* odd_function) {
  hash = reinterpret_cast<Hash>(hash_function);
  plan_of = reinterpret_cast<PlanOf>(plan_function);
  classify = reinterpret_cast<Classify>(classify_function);
  has_data = reinterpret_cast<HasData>(data_function);
  digest_odd = reinterpret_cast<DigestOdd>(odd_function);
  keep(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Forgets>()));
}

// OpenMP's functions for hashing large content in parallel; without them, one thread hashes.
void hb_set_team(void* run, void* place, void* size, void* pause) {
  team = {reinterpret_cast<decltype(team.run)>(run), reinterpret_cast<decltype(team.place)>(place),
          reinterpret_cast<decltype(team.size)>(size), reinterpret_cast<decltype(team.pause)>(pause)};
}
// Ends OpenMP threads that digests started in this thread; returns whether none are left. OpenMP restarts them on demand.
int hb_end_team() {
  constexpr int kHard = 2;  // omp_pause_hard
  return std::exchange(team_was_run, false) && team.pause && team.pause(kHard) == 0;
}

// Fallthrough for a decomposing op, whose parts are recorded; no cost per call. Its schema name is `name.overload`.
void hb_let_through(const char* name, const char* overload) {
  keep(c10::Dispatcher::singleton().registerImpl({name, overload}, kKey, c10::KernelFunction::makeFallthrough(), std::nullopt, nullptr, __FILE__));
}

Recorder* hb_new(int hashes, int everything_python, int nothing_recorded, uint64_t odd_dtypes) {
  auto* recorder = new Recorder();
  recorder->hashes = hashes;
  recorder->everything_python = everything_python;
  recorder->nothing_recorded = nothing_recorded;
  recorder->odd_dtypes = odd_dtypes;
  recorder->lanes.push({0, 0, -1, 0});
  recorder->others.number(hash, "");  // 0: a call with tensor arguments only
  return recorder;
}
void hb_delete(Recorder* recorder) {
  {
    Guard guard(recorder->lock);
    recorder->dropped = true;
    if (recorder->calls) return;
  }
  delete recorder;
}

int hb_begin(Recorder* recorder) {  // 0 if another trace is active in this process
  Recorder* none = nullptr;
  static std::atomic<uint64_t> begun{0};
  recorder->thread = this_thread().thread;
  recorder->trace = ++begun;
  recorder->over = false;
  return current.compare_exchange_strong(none, recorder);
}
int32_t hb_end(Recorder* recorder) {  // the op that raised last; -1: none
  Guard guard(recorder->lock);
  recorder->over = true;
  Recorder* active = recorder;
  current.compare_exchange_strong(active, nullptr);
  return recorder->failed;
}
void hb_thread(int included) {
  Scratch& scratch = this_thread();
  Recorder* on = current.load();
  set_seen(included && on);
  scratch.entered = included && on ? on->trace : 0;
}

// Starts a lane: the calls of the thread that enters it, until that thread leaves it.
int32_t hb_lane(Recorder* recorder) {
  Scratch& scratch = this_thread();
  Guard guard(recorder->lock);
  if (scratch.owner && scratch.owner != recorder) return -1;  // a thread of a finished trace
  const auto number = static_cast<int32_t>(recorder->lanes.count);
  recorder->lanes.push({static_cast<int32_t>(scratch.lane), static_cast<int32_t>(recorder->records.count), -1, context_of(*recorder, scratch)});
  if (scratch.open) scratch.lanes.push_back(number);
  return number;
}
struct Entered {
  Scratch before;
  bool recorded;
};
Entered* hb_enter(Recorder* recorder, int32_t lane) {
  Scratch& scratch = this_thread();
  auto* entered = new Entered{std::exchange(scratch, Scratch()), c10::impl::tls_is_dispatch_key_included(kKey)};
  scratch.owner = recorder;
  scratch.lane = static_cast<uint32_t>(lane);
  {
    Guard guard(recorder->lock);
    scratch.context = recorder->lanes[static_cast<size_t>(lane)].context;
  }
  set_seen(true);
  return entered;
}
void hb_leave(Entered* entered) {
  Scratch& scratch = this_thread();
  set_seen(entered->recorded);
  scratch = std::move(entered->before);
  delete entered;
}
// Mark of this thread's autograd sequence numbers, which are per thread.
int64_t hb_thread_mark(Recorder* recorder) {
  const auto node = torch::autograd::get_current_node();
  return in_thread(*recorder, 0, node ? node->thread_id() : this_thread().thread);
}
// Ends the trace in a child forked during it.
void hb_forked() {
  Scratch& scratch = this_thread();
  if (Recorder* recorder = current.exchange(nullptr)) new (&recorder->lock) Lock();  // its owner may not exist here
  set_seen(false);
  scratch = Scratch();
}

uint32_t* hb_context(Recorder* recorder) { return reinterpret_cast<uint32_t*>(&recorder->context); }
// Starts the numbers of contexts at `start`.
void hb_contexts_from(Recorder* recorder, uint32_t start) {
  recorder->modules.start = start;
  recorder->set_context();
}
void hb_know_modules(Recorder* recorder, void** modules, int32_t count, int32_t first) {  // null: none
  for (int32_t i = 0; i < count; i++)
    if (modules[i]) recorder->modules.know(modules[i], static_cast<uint32_t>(first + i));
}
void hb_forget_modules(Recorder* recorder) { recorder->modules.forget(); }
// Returns whether there were any.
int hb_leave_modules(Recorder* recorder) {
  const bool any = !recorder->modules.inside.empty();
  recorder->modules.inside.clear();
  recorder->modules.place = 0;
  recorder->set_context();
  return any;
}
int32_t hb_place(Recorder* recorder) { return static_cast<int32_t>(recorder->modules.place); }
MethodDef* hb_module_functions() {
  constexpr int kOneArgument = 8;  // METH_O
  static MethodDef functions[] = {{"enter_module", reinterpret_cast<Method>(&enter_module<false>), kOneArgument, nullptr},
                                  {"enter_module_by_hook", reinterpret_cast<Method>(&enter_module<true>), kOneArgument, nullptr},
                                  {"leave_module", reinterpret_cast<Method>(&leave_module), kOneArgument, nullptr}};
  return functions;
}
void hb_backward_in_python(Recorder* recorder) { recorder->backward_python = true; }
void hb_name(Recorder* recorder, void** tensors, int32_t count, int32_t first) {
  Guard guard(recorder->lock);
  for (int32_t i = count; i-- > 0;)  // the first of several names wins
    if (tensors[i]) recorder->names.set(static_cast<c10::TensorImpl*>(tensors[i]), first + i);
}

// 1 and the node if the storage is known, 2 if Python has further state, else 0.
int hb_node(Recorder* recorder, void* storage, int32_t* node) {
  Guard guard(recorder->lock);
  const auto* entry = recorder->writers.find(static_cast<c10::StorageImpl*>(storage));
  if (!entry) return 0;
  *node = entry->node;
  return entry->python ? 2 : 1;
}
void hb_set_node(Recorder* recorder, void* storage, int32_t node, int python) {
  Guard guard(recorder->lock);
  recorder->writers.set(static_cast<c10::StorageImpl*>(storage), node, python);
}
int32_t hb_take_record(Recorder* recorder) {  // number of a record made by Python
  Scratch& scratch = this_thread();
  Guard guard(recorder->lock);
  const auto number = static_cast<int32_t>(recorder->records.count);
  Record record{};
  record.op = record.parent = -1;
  record.context = context_of(*recorder, scratch);
  record.lane = scratch.owner == recorder ? scratch.lane : 0;
  record.sequence = hb_thread_mark(recorder);
  recorder->records.push(record);
  if (scratch.open) scratch.children.push_back(number);
  return number;
}
// Number of a leaf made by Python. Atomically marks it as the last writer of these storages (`python` as in `Writers`). 0 if
// another thread just did so for the only one.
int32_t hb_take_leaf(Recorder* recorder, void** storages, int32_t count, int python) {
  Guard guard(recorder->lock);
  const auto storage = [&](int32_t i) { return static_cast<c10::StorageImpl*>(storages[i]); };
  if (count == 1)
    if (const auto* entry = recorder->writers.find(storage(0)); entry && !entry->python) return 0;
  recorder->leaves.push({0, 0, static_cast<int64_t>(recorder->records.count), 0, 0, -3, 0});
  const auto number = -static_cast<int32_t>(recorder->leaves.count);
  for (int32_t i = 0; i < count; i++) recorder->writers.set(storage(i), number, python);
  return number;
}
// Maps an alias passed to Python, tensor or storage, to the call's own.
void* hb_origin(void* shown) {
  Scratch& scratch = this_thread();
  if (!scratch.handed) return shown;
  for (const auto& [original, copy] : scratch.handed->tensors)
    if (copy.unsafeGetTensorImpl() == shown) return original.unsafeGetTensorImpl();
  for (const auto& [original, copy] : scratch.handed->storages)
    if (copy.unsafeGetStorageImpl() == shown) return original.unsafeGetStorageImpl();
  return shown;
}
// Number of the name of the call's tensor; -1: none, -2: unnamed nn.Parameter.
int32_t hb_name_of(Recorder* recorder, void* tensor) {
  auto* impl = static_cast<c10::TensorImpl*>(tensor);
  int32_t number;
  {
    Guard guard(recorder->lock);
    bool certain;
    number = recorder->names.of(impl, certain);
    if (certain) return number;
  }
  return ask(classify, -1, at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl)), number);
}
// Encloses a call recorded by Python: records made inside become its children.
int64_t hb_open() {
  Scratch& scratch = this_thread();
  scratch.open++;
  return static_cast<int64_t>(scratch.children.size() | scratch.lanes.size() << 32);
}
void hb_close(Recorder* recorder, int64_t before, int32_t number) {  // number: -1 if the call raised
  Scratch& scratch = this_thread();
  Guard guard(recorder->lock);
  const auto outer = before & 0xFFFFFFFF;
  close_lanes(*recorder, scratch, static_cast<size_t>(before >> 32), number);
  scratch.open--;
  auto& children = scratch.children;
  if (number >= 0)
    for (size_t i = static_cast<size_t>(outer); i < children.size(); i++)
      if (children[i] != number) recorder->records[static_cast<size_t>(children[i])].parent = number;
  children.resize(static_cast<size_t>(outer));
  if (number >= 0 && scratch.open) children.push_back(number);
}
const char* hb_dtype(int number) {  // torch's name of a dtype, or null
  if (number < 0 || number >= static_cast<int>(c10::ScalarType::NumOptions)) return nullptr;
  static thread_local std::string name;
  try {
    name = c10::getDtypeNames(static_cast<c10::ScalarType>(number)).first;
  } catch (const std::exception&) {
    return nullptr;
  }
  return name.c_str();
}

int64_t hb_count(Recorder* recorder, int what) {
  Guard guard(recorder->lock);
  const size_t counts[] = {recorder->records.count, recorder->reads.count, recorder->writes.count, recorder->leaves.count,
                           recorder->others.all.size(), recorder->metas.all.size(), recorder->lanes.count,
                           static_cast<size_t>(recorder->calls)};
  return static_cast<int64_t>(counts[what]);
}
void hb_copy(Recorder* recorder, int what, int64_t count, void* out) {
  Guard guard(recorder->lock);
  if (what == 0) recorder->records.copy(count, static_cast<Record*>(out));
  else if (what == 1) recorder->reads.copy(count, static_cast<Read*>(out));
  else if (what == 2) recorder->writes.copy(count, static_cast<Write*>(out));
  else if (what == 3) recorder->leaves.copy(count, static_cast<Leaf*>(out));
  else recorder->lanes.copy(count, static_cast<Lane*>(out));
}
const char* hb_text(Recorder* recorder, int what, int64_t number, int64_t* size) {
  Guard guard(recorder->lock);
  const std::string_view text = (what == 4 ? recorder->others : recorder->metas).all[static_cast<size_t>(number)];
  *size = static_cast<int64_t>(text.size());
  return text.data();
}
}

// Records every dispatched call: its reads, its writes, and digests of the written tensors.
//
// A fallback on a dispatch key unused by torch, and kernels of common ops at that key, see every call just before its
// backend kernel: below autograd, autocast, functorch's transforms, dispatch modes and tensor subclasses, which turn one
// call into those that are computed. They do not change what is dispatched, hold no tensor, and call no operator. Calls
// that they cannot record (a sparse tensor, an accelerator, a collective), and calls with an observer, are forwarded to
// Python by a second key.
//
// Loaded by hashbench/core/native/library.py, which documents the entry points at the end.

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "call.h"
#include "digest.h"
#include "forward.h"
#include "kernels.h"
#include "ops.h"
#include "tables.h"
#include "thread.h"

#if __has_include("unboxed.h") && !defined(HASHBENCH_ONLY_BOXED)
#include "unboxed.h"
#else
namespace {
void register_usual() {}
}  // namespace
#endif

namespace {

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

// Called before and after a module; same results as Python's `ModuleStack` (hashbench/core/trace/module_paths.py).
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
void hb_backward_in_python(Recorder* recorder, int on) { recorder->backward_python = on; }
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
// Number of a callee that is not dispatched, as that of an op. At most 64 arguments, of which these bits are tensors.
int32_t hb_know_kernel(Recorder* recorder, int32_t arguments, uint64_t tensors, uint64_t written, int blank) {
  auto op = std::make_shared<Op>();
  op->plan.written = written, op->plan.fresh = 1, op->plan.blank = static_cast<uint8_t>(blank), op->plan.training = -1;
  op->arguments = op->positional = arguments;
  op->each.resize(static_cast<size_t>(arguments));
  for (int position = 0; position < arguments; position++) op->each[position].lists = !(tensors >> position & 1);
  Guard guard(recorder->lock);
  op->id = kFirstKernel + static_cast<int32_t>(recorder->kernels.size());
  recorder->kernels.push_back(std::move(op));
  return recorder->kernels.back()->id;
}
// Begins the record of a kernel's call; null if Python must record it.
KernelCall* hb_kernel(Recorder* recorder, int32_t kernel, const int64_t* values) {
  auto call = std::make_unique<KernelCall>();
  return call->begin(*recorder, *recorder->kernels[static_cast<size_t>(kernel - kFirstKernel)], values) ? call.release() : nullptr;
}
void hb_kernel_ended(KernelCall* ended, int returned) {  // 0 if it raised
  const std::unique_ptr<KernelCall> call(ended);
  returned ? call->call->record() : call->call->undo();
}
int hb_allocated(Recorder* recorder, int32_t allocator, int64_t tensor) {  // 0 if Python must record it
  Borrowed made;
  made.add(tensor);
  return add_allocation(*recorder, *recorder->kernels[static_cast<size_t>(allocator - kFirstKernel)], made.all.back());
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

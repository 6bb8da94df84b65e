// State of a thread whose calls are recorded, and its callbacks into Python.
//
// Part of recorder.cpp, which is one translation unit.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <utility>
#include <vector>

#include "ops.h"
#include "tables.h"

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

// Callbacks into Python, called with the GIL.
// Number of a leaf's name (`number` is a candidate); -1 if unnamed, -2 for an unnamed Parameter.
using Classify = int32_t (*)(_object* tensor, int32_t number);
using HasData = int32_t (*)(_object* tensor);                         // 0: a placeholder (fake tensor)
// Hashes a record's output, unless uninitialized, and marks it; returns the digest's number.
using DigestOdd = uint32_t (*)(_object* tensor, int32_t number, int32_t blank);
Classify classify = nullptr;
HasData has_data = nullptr;
DigestOdd digest_odd = nullptr;

// Scope of a callback into Python. Garbage collection is disabled, so that finalizers run after the call. Program code that
// runs anyway (signal handlers; a collection that Python 3.12 has scheduled) goes through `fallback`.
struct Handed;
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

}  // namespace

// One recorded call, from its arrival to its record; `fallback` takes every call boxed.
//
// Part of recorder.cpp, which is one translation unit.

#pragma once

#include <ATen/SequenceNumber.h>
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#else
#include <torch/csrc/autograd/function.h>
#endif

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>

#include "arguments.h"
#include "digest.h"
#include "forward.h"
#include "thread.h"

namespace {

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
      if (tensor.nbytes() < storage->nbytes() || !tensor.is_non_overlapping_and_dense()) return false;  // part of a leaf
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

// True if Python decides whether a call of a backward pass is recorded: compiled code is a node made in Python (`PyNode`, a class of
// libtorch_python, known by its name alone).
bool is_left_to_python(const Recorder& recorder, const torch::autograd::Node* node) {
  if (!node || !recorder.backward_python.load(std::memory_order_relaxed)) return false;
  return std::strcmp(typeid(*node).name(), "N5torch8autograd6PyNodeE") == 0;
}

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
  if (plan.python || recorder.everything_python || is_left_to_python(recorder, node.get())) {
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

}  // namespace

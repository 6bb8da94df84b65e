// Ops that the recorder has met: their plans, which Python reads from schemas, and the defaults of their arguments.
//
// Part of recorder.cpp, which is one translation unit.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "tables.h"

namespace {

// Filled by Python, which reads schemas for both tracers (hashbench/core/trace/op_schema.py).
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
PlanOf plan_of = nullptr;

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

}  // namespace

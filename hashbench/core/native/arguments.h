// Non-tensor arguments of a call as bytes, without those that have their defaults.
//
// Part of recorder.cpp, which is one translation unit.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>

#include "ops.h"

namespace {

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

// Read by hashbench/core/trace/native/decode.py, `_Values`.
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

}  // namespace

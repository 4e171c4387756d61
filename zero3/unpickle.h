// zero3/unpickle.h
//
// Reads what Python's pickle has written (protocols 2 to 5), as far as it is plain data: texts,
// numbers, lists, dictionaries, and tensors, whose elements lie beside the pickle. A pickle is a
// program, and this runs nothing of it: what stands for an object of any other class, or for the
// answer of a function, becomes an object of no value, and what it would have done is not done.
//
// Thread safety: pure functions. Their input comes from a file: they return errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "zero3/safetensors.h"

namespace offload::zero3 {

// Where a tensor's elements are: in the storage of that key, which the file has beside the pickle.
struct TensorOnFile {
  std::string storage;
  uint64_t storage_elements = 0;
  uint64_t offset_elements = 0;  // of the first one, within its storage
  FileDtype dtype = FileDtype::kF32;
  std::vector<int64_t> shape;  // none: a scalar
  uint64_t element_count = 0;  // product of shape
  bool is_row_by_row = true;   // without gaps
};

struct PickledObject {
  enum class Kind : uint8_t {
    kNone,
    kFlag,  // `integer`: 0 or 1
    kInteger,
    kNumber,
    kText,
    kBytes,       // `text`
    kList,        // `items`; also tuples and sets
    kDictionary,  // `items`: key, value, key, value …
    kTensor,
    kClass,    // `text`: its module and its name, "torch FloatStorage"
    kStorage,  // `tensor`, all of it
    kOther,    // of another class: no value
  };

  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<PickledObject*> items;
  std::unique_ptr<TensorOnFile> tensor;

  // The value of a key of a dictionary, the last one where it is there twice; null when it is not
  // there, or this is none.
  const PickledObject* Find(std::string_view key) const;
  // Of a number: nothing for what is none.
  std::optional<double> Number() const;
};

// What was read. Its objects live as long as it does, and may hold one another.
class Unpickled {
 public:
  const PickledObject& root() const { return *root_; }
  // Whether there was anything of another class, or that would have had to be run.
  bool has_others() const { return has_others_; }

 private:
  friend class Unpickler;
  std::deque<PickledObject> objects_;
  PickledObject* root_ = nullptr;
  bool has_others_ = false;
};

inline constexpr uint64_t kPickledObjectsMax = 1u << 20;

// INVALID_ARGUMENT, with what is wrong, for bytes that are no pickle, or one of too many objects.
absl::StatusOr<Unpickled> Unpickle(std::string_view bytes);

}  // namespace offload::zero3

#include "zero3/unpickle.h"

#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace offload::zero3 {
namespace {

using Kind = PickledObject::Kind;

constexpr size_t kRankMax = 64;       // dimensions of a tensor
constexpr size_t kKeyBytesMax = 255;  // of the name of a storage

// torch's types of storages that hold numbers.
struct StorageType {
  std::string_view name;
  FileDtype dtype;
};
constexpr StorageType kStorageTypes[] = {
    {"torch FloatStorage", FileDtype::kF32},     {"torch DoubleStorage", FileDtype::kF64},
    {"torch BFloat16Storage", FileDtype::kBF16}, {"torch HalfStorage", FileDtype::kF16},
    {"torch LongStorage", FileDtype::kI64},      {"torch IntStorage", FileDtype::kI32},
    {"torch ShortStorage", FileDtype::kI16},     {"torch CharStorage", FileDtype::kI8},
    {"torch ByteStorage", FileDtype::kU8},       {"torch BoolStorage", FileDtype::kBool},
};

const StorageType* FindStorageType(std::string_view name) {
  for (const StorageType& type : kStorageTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

// What may be called, since what it makes is data.
constexpr std::string_view kRebuildTensor = "torch._utils _rebuild_tensor_v2";
constexpr std::string_view kRebuildParameter = "torch._utils _rebuild_parameter";
constexpr std::string_view kOrderedDict = "collections OrderedDict";
constexpr std::string_view kSize = "torch Size";

// Types of elements, as torch says them beside tensors.
constexpr std::string_view kPlain[] = {"torch float32",  "torch float64", "torch float16",
                                       "torch bfloat16", "torch int64",   "torch device"};

bool IsKnown(std::string_view name) {
  for (const std::string_view plain : kPlain) {
    if (plain == name) return true;
  }
  return name == kRebuildTensor || name == kRebuildParameter || name == kOrderedDict ||
         name == kSize || FindStorageType(name) != nullptr;
}

absl::Status Wrong(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("no pickle: ", std::string(what)));
}

bool IsIndex(const PickledObject& object) {
  return object.kind == Kind::kInteger && object.integer >= 0;
}

std::optional<uint64_t> Product(uint64_t a, uint64_t b) {
  uint64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::nullopt : std::optional(product);
}

// Whether strides are those of rows without gaps; of dimensions of one element they are any.
bool AreRows(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  uint64_t stride = 1;  // of a file: any number
  for (size_t dimension = shape.size(); dimension-- > 0;
       stride *= static_cast<uint64_t>(shape[dimension])) {
    if (shape[dimension] != 1 && static_cast<uint64_t>(strides[dimension]) != stride) return false;
  }
  return true;
}

}  // namespace

const PickledObject* PickledObject::Find(std::string_view key) const {
  if (kind != Kind::kDictionary) return nullptr;
  for (size_t i = items.size(); i >= 2; i -= 2) {
    const PickledObject& name = *items[i - 2];
    if (name.kind == Kind::kText && name.text == key) return items[i - 1];
  }
  return nullptr;
}

std::optional<double> PickledObject::Number() const {
  if (kind == Kind::kInteger) return static_cast<double>(integer);
  if (kind == Kind::kNumber) return number;
  return std::nullopt;
}

// The machine that a pickle is written for: a stack, marks in it, and a memo.
class Unpickler {
 public:
  explicit Unpickler(std::string_view bytes) : bytes_(bytes) {}

  absl::StatusOr<Unpickled> Run() {
    for (;;) {
      OFFLOAD_ASSIGN_OR_RETURN(const std::string_view code, Take(1));
      if (code[0] == '.') break;
      OFFLOAD_RETURN_IF_ERROR(Execute(static_cast<uint8_t>(code[0])));
    }
    if (stack_.size() != 1 || !marks_.empty()) return Wrong("it leaves more than one object");
    result_.root_ = stack_.back();
    return std::move(result_);
  }

 private:
  // ---- Bytes ----

  absl::StatusOr<std::string_view> Take(uint64_t count) {
    if (count > bytes_.size() - at_) return Wrong(absl::StrCat("it ends after byte ", at_));
    const std::string_view taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }

  template <typename T>
  absl::StatusOr<T> Number() {
    OFFLOAD_ASSIGN_OR_RETURN(const std::string_view bytes, Take(sizeof(T)));
    T number;
    std::memcpy(&number, bytes.data(), sizeof(number));
    return number;
  }

  absl::StatusOr<std::string_view> Line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) return Wrong(absl::StrCat("it ends after byte ", at_));
    const std::string_view line = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return line;
  }

  // ---- Objects ----

  absl::StatusOr<PickledObject*> New(Kind kind) {
    if (result_.objects_.size() >= kPickledObjectsMax)
      return Wrong(absl::StrCat("it has more than ", kPickledObjectsMax, " objects"));
    PickledObject& object = result_.objects_.emplace_back();
    object.kind = kind;
    if (kind == Kind::kOther) result_.has_others_ = true;
    return &object;
  }

  absl::Status Push(Kind kind, int64_t integer = 0, double number = 0) {
    OFFLOAD_ASSIGN_OR_RETURN(PickledObject* const object, New(kind));
    object->integer = integer;
    object->number = number;
    stack_.push_back(object);
    return absl::OkStatus();
  }

  absl::Status PushText(Kind kind, std::string_view text) {
    OFFLOAD_RETURN_IF_ERROR(Push(kind));
    stack_.back()->text = std::string(text);
    return absl::OkStatus();
  }

  template <typename Length>
  absl::Status PushLong(Kind kind) {
    OFFLOAD_ASSIGN_OR_RETURN(const Length length, Number<Length>());
    OFFLOAD_ASSIGN_OR_RETURN(const std::string_view text, Take(length));
    return PushText(kind, text);
  }

  // What lies above the last mark leaves the stack.
  absl::StatusOr<std::vector<PickledObject*>> TakeMarked() {
    if (marks_.empty()) return Wrong("a mark is missing");
    std::vector<PickledObject*> items(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()),
                                      stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }

  size_t Height() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }

  absl::StatusOr<PickledObject*> Pop() {
    if (Height() == 0) return Wrong("its stack is empty");
    PickledObject* const object = stack_.back();
    stack_.pop_back();
    return object;
  }

  absl::StatusOr<PickledObject*> Top() const {
    if (Height() == 0) return Wrong("its stack is empty");
    return stack_.back();
  }

  // ---- Instructions ----

  absl::Status Execute(uint8_t code) {
    switch (code) {
      case 0x80:  // PROTO
        return Take(1).status();
      case 0x95:  // FRAME
        return Take(8).status();
      case '(':
        marks_.push_back(stack_.size());
        return absl::OkStatus();
      case '0':
        return Pop().status();
      case '1':
        return TakeMarked().status();
      case '2': {
        OFFLOAD_ASSIGN_OR_RETURN(PickledObject* const top, Top());
        return PushAgain(top);
      }
      case 'q':
      case 'r':
      case 0x94:
        return Memorize(code);
      case 'h':
      case 'j':
        return Recall(code);
      case 'c':
      case 0x93:
        return PushClass(code);
      case 'R':
      case 0x81:
      case 0x92:
        return Call(code);
      case 'b':
        return Build();
      case 'Q':
        return PushStorage();
      default:
        return IsContainer(code) ? ExecuteContainer(code) : PushValue(code);
    }
  }

  absl::Status PushValue(uint8_t code) {
    switch (code) {
      case 'N':
        return Push(Kind::kNone);
      case 0x88:
        return Push(Kind::kFlag, 1);
      case 0x89:
        return Push(Kind::kFlag, 0);
      case 'J':
        return PushInteger<int32_t>();
      case 'K':
        return PushInteger<uint8_t>();
      case 'M':
        return PushInteger<uint16_t>();
      case 0x8a:
        return PushLongInteger<uint8_t>();
      case 0x8b:
        return PushLongInteger<uint32_t>();
      case 'G':
        return PushDouble();
      case 'X':
      case 'T':
        return PushLong<uint32_t>(Kind::kText);
      case 0x8c:
      case 'U':
        return PushLong<uint8_t>(Kind::kText);
      case 0x8d:
        return PushLong<uint64_t>(Kind::kText);
      case 'B':
        return PushLong<uint32_t>(Kind::kBytes);
      case 'C':
        return PushLong<uint8_t>(Kind::kBytes);
      case 0x8e:
      case 0x96:
        return PushLong<uint64_t>(Kind::kBytes);
      default:
        return Wrong(absl::StrCat("instruction ", code, " before byte ", at_));
    }
  }

  template <typename T>
  absl::Status PushInteger() {
    OFFLOAD_ASSIGN_OR_RETURN(const T number, Number<T>());
    return Push(Kind::kInteger, static_cast<int64_t>(number));
  }

  // Little endian, two's complement. One of more than 64 bits is none that anybody here wants.
  template <typename Length>
  absl::Status PushLongInteger() {
    OFFLOAD_ASSIGN_OR_RETURN(const Length length, Number<Length>());
    OFFLOAD_ASSIGN_OR_RETURN(const std::string_view bytes, Take(length));
    if (length > sizeof(int64_t)) return Push(Kind::kOther);
    int64_t number = length > 0 && (bytes.back() & 0x80) != 0 ? -1 : 0;
    std::memcpy(&number, bytes.data(), bytes.size());
    return Push(Kind::kInteger, number);
  }

  absl::Status PushDouble() {
    OFFLOAD_ASSIGN_OR_RETURN(const uint64_t big_endian, Number<uint64_t>());
    const uint64_t bits = __builtin_bswap64(big_endian);
    double number;
    std::memcpy(&number, &bits, sizeof(number));
    return Push(Kind::kNumber, 0, number);
  }

  static bool IsContainer(uint8_t code) {
    return std::string_view(")t\x85\x86\x87]lae}dsu\x8f\x90\x91").find(static_cast<char>(code)) !=
           std::string_view::npos;
  }

  absl::Status ExecuteContainer(uint8_t code) {
    switch (code) {
      case ')':
      case ']':
      case 0x8f:
        return Push(Kind::kList);
      case '}':
        return Push(Kind::kDictionary);
      case 't':
      case 'l':
      case 0x91:
        return PushMarked(Kind::kList);
      case 'd':
        return PushMarked(Kind::kDictionary);
      case 0x85:
      case 0x86:
      case 0x87:
        return PushTuple(code - 0x84u);
      case 'a':
        return AppendLast(1, Kind::kList);
      case 's':
        return AppendLast(2, Kind::kDictionary);
      case 'e':
      case 0x90:
        return AppendMarked(Kind::kList);
      default:
        return AppendMarked(Kind::kDictionary);
    }
  }

  absl::Status PushMarked(Kind kind) {
    OFFLOAD_ASSIGN_OR_RETURN(std::vector<PickledObject*> items, TakeMarked());
    if (kind == Kind::kDictionary && items.size() % 2 != 0) return Wrong("a key without value");
    OFFLOAD_RETURN_IF_ERROR(Push(kind));
    stack_.back()->items = std::move(items);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<PickledObject*>> TakeLast(size_t count) {
    if (Height() < count) return Wrong("its stack is empty");
    std::vector<PickledObject*> items(stack_.end() - static_cast<ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return items;
  }

  absl::Status PushTuple(size_t count) {
    OFFLOAD_ASSIGN_OR_RETURN(std::vector<PickledObject*> items, TakeLast(count));
    OFFLOAD_RETURN_IF_ERROR(Push(Kind::kList));
    stack_.back()->items = std::move(items);
    return absl::OkStatus();
  }

  absl::Status AppendLast(size_t count, Kind kind) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::vector<PickledObject*> items, TakeLast(count));
    return Append(items, kind);
  }

  absl::Status AppendMarked(Kind kind) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::vector<PickledObject*> items, TakeMarked());
    if (kind == Kind::kDictionary && items.size() % 2 != 0) return Wrong("a key without value");
    return Append(items, kind);
  }

  // What an object of another class is filled with is left out with it.
  absl::Status Append(const std::vector<PickledObject*>& items, Kind kind) {
    OFFLOAD_ASSIGN_OR_RETURN(PickledObject* const container, Top());
    if (container->kind == Kind::kOther) return absl::OkStatus();
    if (container->kind != kind) return Wrong("it fills what is no container");
    OFFLOAD_RETURN_IF_ERROR(CountItems(items.size()));
    container->items.insert(container->items.end(), items.begin(), items.end());
    return absl::OkStatus();
  }

  // One object may be in many containers.
  absl::Status CountItems(uint64_t more) {
    item_count_ += more;
    if (item_count_ <= 2 * kPickledObjectsMax) return absl::OkStatus();
    return Wrong(absl::StrCat("it has more than ", kPickledObjectsMax, " objects"));
  }

  absl::Status PushAgain(PickledObject* object) {
    if (stack_.size() >= 2 * kPickledObjectsMax)
      return Wrong(absl::StrCat("it has more than ", kPickledObjectsMax, " objects"));
    stack_.push_back(object);
    return absl::OkStatus();
  }

  absl::Status Memorize(uint8_t code) {
    OFFLOAD_ASSIGN_OR_RETURN(PickledObject* const object, Top());
    uint64_t place = memo_.size();
    if (code != 0x94) {
      OFFLOAD_ASSIGN_OR_RETURN(place, Place(code == 'q'));
    }
    if (place >= kPickledObjectsMax) return Wrong("its memo is too large");
    if (place >= memo_.size()) memo_.resize(place + 1);
    memo_[place] = object;
    return absl::OkStatus();
  }

  absl::Status Recall(uint8_t code) {
    OFFLOAD_ASSIGN_OR_RETURN(const uint64_t place, Place(code == 'h'));
    if (place >= memo_.size() || memo_[place] == nullptr)
      return Wrong(absl::StrCat("it recalls object ", place, ", which is not there"));
    return PushAgain(memo_[place]);
  }

  absl::StatusOr<uint64_t> Place(bool is_short) {
    if (!is_short) return Number<uint32_t>();
    return Number<uint8_t>();
  }

  // ---- Classes and functions ----

  absl::Status PushClass(uint8_t code) {
    std::string module, name;
    if (code == 'c') {
      OFFLOAD_ASSIGN_OR_RETURN(module, Line());
      OFFLOAD_ASSIGN_OR_RETURN(name, Line());
    } else {
      OFFLOAD_ASSIGN_OR_RETURN(const PickledObject* const second, Pop());
      OFFLOAD_ASSIGN_OR_RETURN(const PickledObject* const first, Pop());
      if (first->kind != Kind::kText || second->kind != Kind::kText)
        return Wrong("a class without a name");
      module = first->text;
      name = second->text;
    }
    constexpr size_t kNameBytesMax = 255;
    if (module.size() > kNameBytesMax || name.size() > kNameBytesMax) return Push(Kind::kOther);
    const std::string full = absl::StrCat(module, " ", name);
    if (!IsKnown(full)) return Push(Kind::kOther);
    return PushText(Kind::kClass, full);
  }

  absl::Status Call(uint8_t code) {
    if (code == 0x92) OFFLOAD_RETURN_IF_ERROR(Pop().status());  // arguments by name
    OFFLOAD_ASSIGN_OR_RETURN(PickledObject* const arguments, Pop());
    OFFLOAD_ASSIGN_OR_RETURN(const PickledObject* const callee, Pop());
    if (callee->kind != Kind::kClass || arguments->kind != Kind::kList) return Push(Kind::kOther);
    const std::vector<PickledObject*>& given = arguments->items;
    if (callee->text == kRebuildTensor) return PushTensor(given);
    if (callee->text == kRebuildParameter && !given.empty()) return PushAgain(given.front());
    if (callee->text == kOrderedDict) return PushOrderedDict(given);
    if (callee->text == kSize && given.size() == 1 && given.front()->kind == Kind::kList)
      return PushAgain(given.front());
    return Push(Kind::kOther);
  }

  absl::Status PushOrderedDict(const std::vector<PickledObject*>& given) {
    OFFLOAD_RETURN_IF_ERROR(Push(Kind::kDictionary));
    if (given.empty()) return absl::OkStatus();
    OFFLOAD_RETURN_IF_ERROR(CountItems(2 * given.front()->items.size()));
    for (const PickledObject* const pair : given.front()->items) {
      if (pair->kind != Kind::kList || pair->items.size() != 2) return Wrong("a key without value");
      stack_.back()->items.insert(stack_.back()->items.end(), pair->items.begin(),
                                  pair->items.end());
    }
    return absl::OkStatus();
  }

  // Attributes of a dictionary, or of what is left out.
  absl::Status Build() {
    OFFLOAD_RETURN_IF_ERROR(Pop().status());
    return Top().status();
  }

  // ("storage", its type, key, device, elements)
  absl::Status PushStorage() {
    OFFLOAD_ASSIGN_OR_RETURN(const PickledObject* const id, Pop());
    const auto& items = id->items;
    if (id->kind != Kind::kList || items.size() < 5 || items[0]->text != "storage" ||
        items[1]->kind != Kind::kClass || items[2]->kind != Kind::kText || !IsIndex(*items[4]))
      return Push(Kind::kOther);
    const StorageType* const type = FindStorageType(items[1]->text);
    if (type == nullptr || items[2]->text.size() > kKeyBytesMax) return Push(Kind::kOther);
    OFFLOAD_RETURN_IF_ERROR(Push(Kind::kStorage));
    const auto elements = static_cast<uint64_t>(items[4]->integer);
    stack_.back()->tensor = std::make_unique<TensorOnFile>(TensorOnFile{
        .storage = items[2]->text, .storage_elements = elements, .dtype = type->dtype});
    return absl::OkStatus();
  }

  static std::optional<std::vector<int64_t>> Indices(const PickledObject& list) {
    if (list.kind != Kind::kList || list.items.size() > kRankMax) return std::nullopt;
    std::vector<int64_t> indices;
    for (const PickledObject* const item : list.items) {
      if (!IsIndex(*item)) return std::nullopt;
      indices.push_back(item->integer);
    }
    return indices;
  }

  // _rebuild_tensor_v2(storage, offset, shape, strides, …)
  absl::Status PushTensor(const std::vector<PickledObject*>& given) {
    constexpr std::string_view kWrong = "a tensor that cannot be";
    if (given.size() < 4) return Wrong(kWrong);
    if (given[0]->kind == Kind::kOther) return Push(Kind::kOther);
    const auto shape = Indices(*given[2]);
    const auto strides = Indices(*given[3]);
    if (given[0]->kind != Kind::kStorage || !IsIndex(*given[1]) || !shape.has_value() ||
        !strides.has_value() || shape->size() != strides->size())
      return Wrong(kWrong);
    TensorOnFile tensor = *given[0]->tensor;
    tensor.offset_elements = static_cast<uint64_t>(given[1]->integer);
    std::optional<uint64_t> count = 1;
    for (const int64_t dimension : *shape) {
      count = Product(*count, static_cast<uint64_t>(dimension));
      if (!count.has_value()) return Wrong(kWrong);
    }
    tensor.element_count = *count;
    tensor.is_row_by_row = tensor.element_count == 0 || AreRows(*shape, *strides);
    tensor.shape = *shape;
    if (tensor.is_row_by_row &&
        (tensor.offset_elements > tensor.storage_elements ||
         tensor.element_count > tensor.storage_elements - tensor.offset_elements))
      return Wrong("a tensor that is longer than its storage");
    OFFLOAD_RETURN_IF_ERROR(Push(Kind::kTensor));
    stack_.back()->tensor = std::make_unique<TensorOnFile>(std::move(tensor));
    return absl::OkStatus();
  }

  const std::string_view bytes_;
  size_t at_ = 0;
  Unpickled result_;
  std::vector<PickledObject*> stack_, memo_;
  std::vector<size_t> marks_;
  uint64_t item_count_ = 0;
};

absl::StatusOr<Unpickled> Unpickle(std::string_view bytes) { return Unpickler(bytes).Run(); }

}  // namespace offload::zero3

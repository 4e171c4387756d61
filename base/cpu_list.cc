#include "base/cpu_list.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <memory>

namespace offload {
namespace {

struct FreeCpuSet {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CpuSet = std::unique_ptr<cpu_set_t, FreeCpuSet>;
const size_t kSetBytes = CPU_ALLOC_SIZE(kCpusMax);

CpuSet MakeCpuSet() {
  CpuSet set(CPU_ALLOC(kCpusMax));
  if (set != nullptr) CPU_ZERO_S(kSetBytes, set.get());
  return set;
}

// Takes a number from the front.
std::optional<uint32_t> TakeNumber(std::string_view& text) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number >= kCpusMax) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

bool TakeLetter(std::string_view& text, char letter) {
  if (text.empty() || text.front() != letter) return false;
  text.remove_prefix(1);
  return true;
}

}  // namespace

std::optional<CpuList> ParseCpuList(std::string_view text) {
  if (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  CpuList list;
  if (text.empty()) return list;
  do {
    const std::optional<uint32_t> first = TakeNumber(text);
    if (!first.has_value()) return std::nullopt;
    const std::optional<uint32_t> last = TakeLetter(text, '-') ? TakeNumber(text) : first;
    if (!last.has_value() || *last < *first) return std::nullopt;
    if (!list.empty() && *first <= list.back()) return std::nullopt;
    for (uint32_t number = *first; number <= *last; ++number) list.push_back(number);
  } while (TakeLetter(text, ','));
  if (!text.empty()) return std::nullopt;
  return list;
}

std::string FormatCpuList(const CpuList& list) {
  std::string text;
  for (size_t begin = 0; begin < list.size();) {
    size_t end = begin + 1;
    while (end < list.size() && list[end] == list[end - 1] + 1) ++end;
    if (!text.empty()) text += ',';
    text += std::to_string(list[begin]);
    if (end - begin > 1) text += '-' + std::to_string(list[end - 1]);
    begin = end;
  }
  return text;
}

CpuList Intersection(const CpuList& a, const CpuList& b) {
  CpuList both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both;
}

CpuList Union(const CpuList& a, const CpuList& b) {
  CpuList either;
  std::set_union(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(either));
  return either;
}

CpuList ProcessorsOf(pid_t thread) {
  const CpuSet set = MakeCpuSet();
  CpuList processors;
  if (set == nullptr || ::sched_getaffinity(thread, kSetBytes, set.get()) != 0) return processors;
  for (uint32_t number = 0; number < kCpusMax; ++number) {
    if (CPU_ISSET_S(number, kSetBytes, set.get())) processors.push_back(number);
  }
  return processors;
}

bool RunOn(const CpuList& processors) {
  const CpuSet set = MakeCpuSet();
  if (set == nullptr) return false;
  for (const uint32_t number : processors) CPU_SET_S(number, kSetBytes, set.get());
  return ::sched_setaffinity(0, kSetBytes, set.get()) == 0;
}

}  // namespace offload

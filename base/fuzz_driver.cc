// Runs a fuzz target without libFuzzer, as a test: every file of its corpus, then a fixed number of
// mutations of them from a fixed seed, so that a finding, which ends the process, comes again.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/random.h"
#include "gtest/gtest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// How many inputs a target has taken as right up to its end; only some targets count them.
extern "C" __attribute__((weak)) int AcceptedInputs();

namespace offload {
namespace {

constexpr int kMutations = 40'000;
constexpr size_t kInputBytesMax = 4096;

std::vector<std::string> ReadCorpus() {
  std::vector<std::string> inputs;
  const char* const folder = std::getenv("FUZZ_CORPUS");
  if (folder == nullptr || !std::filesystem::is_directory(folder)) return inputs;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry);
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

void RunOne(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

char InterestingByte(Random& random) {
  constexpr uint8_t kBytes[] = {0x00, 0x01, 0x7f, 0x80, 0xff, '"', '{', '0'};
  return static_cast<char>(random.OneIn(2) ? kBytes[random.Below(std::size(kBytes))]
                                           : random.Below(256));
}

// One change of the kinds that find most: a bit, a byte, a piece taken out, doubled or put in from
// another input.
void Mutate(const std::vector<std::string>& corpus, Random& random, std::string& input) {
  const size_t place = input.empty() ? 0 : random.Below(input.size());
  const size_t length = 1 + random.Below(16);
  switch (input.empty() ? 3 : random.Below(6)) {
    case 0:
      input[place] = static_cast<char>(input[place] ^ (1 << random.Below(8)));
      return;
    case 1:
      input[place] = InterestingByte(random);
      return;
    case 2:
      input.erase(place, length);
      return;
    case 3:
      input.insert(place, length, InterestingByte(random));
      return;
    case 4:
      input.insert(place, input.substr(random.Below(input.size()), length));
      return;
    default: {
      const std::string& other = corpus[random.Below(corpus.size())];
      input.resize(place);
      if (!other.empty()) input += other.substr(random.Below(other.size()));
    }
  }
}

TEST(FuzzTest, CorpusAndMutationsOfItAreHarmless) {
  std::vector<std::string> corpus = ReadCorpus();
  ASSERT_FALSE(corpus.empty()) << "no corpus in $FUZZ_CORPUS";
  for (const std::string& input : corpus) RunOne(input);
  if (AcceptedInputs != nullptr) {
    EXPECT_GT(AcceptedInputs(), 0) << "the corpus is that of messages as they once were";
  }
  Random random(1);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kMutations; ++i) {
    std::string input = corpus[random.Below(corpus.size())];
    for (uint64_t changes = 1 + random.Below(4); changes > 0; --changes)
      Mutate(corpus, random, input);
    if (input.size() > kInputBytesMax) input.resize(kInputBytesMax);
    RunOne(input);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%d executions, %.0f per second\n", kMutations, kMutations / seconds);
}

}  // namespace
}  // namespace offload

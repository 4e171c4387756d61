// offloadctl top: what jobs do, step by step, while they run.

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "tools/command.h"
#include "tools/daemons.h"
#include "tools/top_view.h"

namespace offload::tools {
namespace {

class TopCommand : public Command {
 public:
  const char* name() const override { return "top"; }
  const char* summary() const override {
    return "Shows live what jobs do: step time, stalls, prefetches, traffic";
  }
  const char* examples() const override {
    return "  offloadctl top\n  offloadctl top --once --json\n";
  }
  void DefineFlags(CLI::App& app) override {
    daemons_.DefineFlags(app);
    app.add_option("--interval", interval_seconds_, "seconds between two looks")
        ->check(CLI::Range(0.01, 60.0));
    app.add_flag("--once", once_, "one look; also what a file or a pipe gets")
        ->always_capture_default(false);
  }

  absl::StatusOr<Answer> Run() override {
    absl::StatusOr<Answer> answer = Look();
    if (answer.ok() && !once_) answer->next = [this] { return LookAgain(); };
    return answer;
  }

 private:
  // Daemons without jobs are asked without a pause between two answers.
  absl::StatusOr<Answer> LookAgain() const {
    const double begin = Clock::Real().NowSeconds();
    absl::StatusOr<Answer> answer = Look();
    const double left_seconds = begin + interval_seconds_ - Clock::Real().NowSeconds();
    if (left_seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left_seconds));
    if (answer.ok()) answer->next = [this] { return LookAgain(); };
    return answer;
  }

  absl::StatusOr<Answer> Look() const {
    const std::vector<DaemonAddress> addresses = daemons_.Addresses();
    Answer answer;
    answer.data["daemons"] = Json::array();
    absl::Status failure;
    const auto all = AskTwice(addresses, daemons_.timeout_seconds(), interval_seconds_);
    for (size_t i = 0; i < addresses.size(); ++i) {
      const absl::StatusOr<TwoAnswers>& answers = all[i];
      if (answers.ok()) {
        absl::StrAppend(&answer.text, TopText(addresses[i], *answers));
        answer.data["daemons"].push_back(DescribeTop(addresses[i], *answers));
      } else if (!absl::IsUnavailable(answers.status()) || daemons_.is_named()) {
        failure = answers.status();  // a socket that a dead daemon left is no news
      }
    }
    if (!answer.data["daemons"].empty()) return answer;
    if (!failure.ok()) return failure;
    return MakeError(ErrorId::kDaemonStart, "no daemon is running",
                     "A trainer starts a private one; offloadctl doctor checks this machine");
  }

  DaemonChoice daemons_;
  double interval_seconds_ = 1;
  bool once_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeTopCommand() { return std::make_unique<TopCommand>(); }

}  // namespace offload::tools

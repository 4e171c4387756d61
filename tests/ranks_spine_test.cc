// Several ranks of one job at the real daemon: they join, agree, take steps and resume with another
// number of ranks; and what each is told when one of them is missing, differs, leaves or dies.
//
// Ranks are threads, each with a session of its own; those that are killed are processes. Every one
// has the whole gradient, as if its trainer had reduced it.

#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random.h"
#include "proto/offload.grpc.pb.h"
#include "tests/daemon_status.h"
#include "tests/node_daemon.h"
#include "tests/spine_fixture.h"

namespace offload {
namespace {

client::World WorldOf(uint32_t rank, uint32_t world_size, const std::string& run_id) {
  return {.rank = rank,
          .world_size = world_size,
          .local_rank = rank,
          .local_world_size = world_size,
          .run_id = run_id,
          .launcher = "test"};
}

Variant VariantOf(uint32_t rank, uint32_t world_size, const std::string& run_id) {
  return {
      .dtype = Dtype::kBFloat16, .state_resident = 1, .world = WorldOf(rank, world_size, run_id)};
}

constexpr uid_t kOtherUser = 65534;

// This program once more, beside the tests (main, below).
pid_t Spawn(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "/proc/self/exe");
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  pid_t pid = -1;
  EXPECT_EQ(posix_spawn(&pid, pointers[0], nullptr, nullptr, pointers.data(), environ), 0);
  return pid;
}

class RanksTest : public SpineFixture {
 protected:
  // The ranks of a launch that is no other test's.
  std::vector<std::unique_ptr<Job>> Launch(uint32_t world_size, const std::string& name = "job") {
    std::vector<std::unique_ptr<Job>> ranks;
    const std::string run_id = NewRunId();
    for (uint32_t rank = 0; rank < world_size; ++rank)
      ranks.push_back(std::make_unique<Job>(pool_, name, VariantOf(rank, world_size, run_id)));
    return ranks;
  }
  std::string NewRunId() { return absl::StrCat("launch-", getpid(), "-", ++launches_); }

  using Ranks = std::vector<std::unique_ptr<Job>>;
  // Runs `work` for all ranks at once.
  static void OnAll(const Ranks& ranks, const std::function<void(Job& rank)>& work) {
    std::vector<std::thread> threads;
    for (const std::unique_ptr<Job>& rank : ranks)
      threads.emplace_back([&work, raw = rank.get()] { work(*raw); });
    for (std::thread& thread : threads) thread.join();
  }
  static void ExpectError(const absl::Status& status, ErrorId id, const std::string& text) {
    EXPECT_EQ(ErrorIdOf(status), id) << status;
    EXPECT_NE(status.message().find(text), absl::string_view::npos) << status << " for " << text;
  }

  // What one of two ranks gets of a call while the other has come to the step; then both take it.
  void ExpectErrorBesideAStep(uint32_t caller,
                              const std::function<absl::Status(client::Session&)>& call,
                              const std::string& text) {
    const Ranks ranks = Launch(2);
    OnAll(ranks, [](Job& rank) { ASSERT_NO_FATAL_FAILURE(rank.Open()); });
    client::StepCommand step;
    step.step = 1;
    std::thread other([&] { EXPECT_TRUE(ranks[1 - caller]->session().Step(step).ok()); });
    client::Session& session = ranks[caller]->session();
    ExpectError(call(session), ErrorId::kRanksDiffer, text);
    EXPECT_TRUE(session.Step(step).ok());
    other.join();
    OnAll(ranks, [](Job& rank) { rank.Close(); });
  }

  // Until the daemon has one job, with so many ranks.
  static void WaitForRanks(int count) {
    proto::v1::StatusReply reply;
    while (!HasFailure() && (reply.jobs_size() == 0 || reply.jobs(0).ranks_size() < count))
      reply = StatusOfDaemon(getenv("OFFLOADD_SOCKET"));
  }
  // A session that has not opened a job.
  static std::unique_ptr<client::Session> Connect(const client::World& world) {
    auto session = client::Session::Connect({.allow_private = false, .world = world});
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

 private:
  // Of this process: the daemon of an earlier test's launch may be just ending.
  static inline int launches_ = 0;
};

// ---- What is computed --------------------------------------------------------------------------

TEST_F(RanksTest, AnyNumberOfRanksTakesTheStepsOfOneAndAnyOtherNumberGoesOn) {
  uint64_t step = 0;
  Job reference(pool_, "job", {.dtype = Dtype::kBFloat16, .state_resident = 1});
  for (const uint32_t world_size : {2u, 4u, 1u, 3u}) {
    SCOPED_TRACE(world_size);
    const Ranks ranks = Launch(world_size);
    OnAll(ranks, [&](Job& rank) {
      if (step > 0) rank.Follow(reference);
      ASSERT_NO_FATAL_FAILURE(rank.Open());
      EXPECT_EQ(rank.info().step, step);
      ASSERT_NO_FATAL_FAILURE(rank.SetSchedule());
      for (int i = 0; i < 2; ++i) {
        ASSERT_NO_FATAL_FAILURE(rank.Step());
        ASSERT_NO_FATAL_FAILURE(rank.Forward());
      }
      ASSERT_NO_FATAL_FAILURE(rank.ExpectEqual());
    });
    for (const std::unique_ptr<Job>& rank : ranks)
      EXPECT_EQ(rank->session().daemon_pid(), ranks.front()->session().daemon_pid());
    OnAll(ranks, [](Job& rank) { rank.Close(); });
    reference.Follow(*ranks.front());
    step += 2;
    if (HasFailure()) return;
  }
}

TEST_F(RanksTest, TheDaemonAddsGradientsAsOneProcessDoesInTheOrderOfPassesAndRanks) {
  for (const auto& [world_size, dtype, spill] :
       {std::tuple(2u, Dtype::kBFloat16, true), std::tuple(3u, Dtype::kFloat32, false),
        std::tuple(3u, Dtype::kFloat32, true), std::tuple(4u, Dtype::kBFloat16, false),
        std::tuple(2u, Dtype::kFloat64, true), std::tuple(3u, Dtype::kFloat16, false)}) {
    SCOPED_TRACE(absl::StrCat(world_size, spill ? " ranks, spilled" : " ranks"));
    const std::string name =
        absl::StrCat("sums", world_size, static_cast<int>(dtype), spill ? "s" : "");
    const std::string run_id = NewRunId();
    Ranks ranks;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      Variant variant = VariantOf(rank, world_size, run_id);
      variant.dtype = dtype;
      variant.spill = spill;
      variant.sums = true;
      ranks.push_back(std::make_unique<Job>(pool_, name, variant));
    }
    OnAll(ranks, [](Job& rank) {
      ASSERT_NO_FATAL_FAILURE(rank.Open());
      for (int i = 0; i < 4; ++i) {
        ASSERT_NO_FATAL_FAILURE(rank.Step());
        ASSERT_NO_FATAL_FAILURE(rank.Forward());
      }
      ASSERT_NO_FATAL_FAILURE(rank.ExpectEqual());
      rank.Close();
    });
    if (HasFailure()) return;
  }
}

TEST_F(RanksTest, EveryRankGetsItsOwnStateBackAndANewOneTheFirstOnes) {
  const Ranks two = Launch(2);
  OnAll(two, [](Job& rank) {
    ASSERT_NO_FATAL_FAILURE(rank.Open());
    ASSERT_NO_FATAL_FAILURE(rank.Step());
    rank.Close();
  });
  const Ranks three = Launch(3);
  OnAll(three, [](Job& rank) {
    ASSERT_NO_FATAL_FAILURE(rank.Open());
    EXPECT_EQ(rank.info().trainer_state,
              absl::StrCat("after 1 in rank ", rank.rank() == 1 ? 1 : 0));
    EXPECT_EQ(rank.info().trainer_state_is_own, rank.rank() < 2);
    rank.Close();
  });
  Job one(pool_, "job", {.dtype = Dtype::kBFloat16, .state_resident = 1});
  ASSERT_NO_FATAL_FAILURE(one.Open());
  EXPECT_EQ(one.info().trainer_state, "after 1 in rank 0");
  one.Close();
}

TEST_F(RanksTest, AnExchangeGivesEveryRankWhatAllHaveSaid) {
  const Ranks ranks = Launch(3);
  OnAll(ranks, [](Job& rank) {
    ASSERT_NO_FATAL_FAILURE(rank.Open());
    for (int round = 0; round < 20; ++round) {
      const auto said = rank.session().Exchange(absl::StrCat("rank ", rank.rank(), ", ", round));
      ASSERT_TRUE(said.ok()) << said.status();
      for (uint32_t other = 0; other < 3; ++other)
        EXPECT_EQ((*said)[other], absl::StrCat("rank ", other, ", ", round));
    }
    const auto large = rank.session().Exchange(std::string((1 << 20) + 1, 'x'));
    ExpectError(large.status(), ErrorId::kBadValue, "at most 1048576");
    EXPECT_TRUE(rank.session().Exchange("").ok());
    rank.Close();
  });
}

TEST_F(RanksTest, AWeightThatAllOverwriteIsWrittenOnce) {
  const Ranks ranks = Launch(2);
  OnAll(ranks, [](Job& rank) {
    ASSERT_NO_FATAL_FAILURE(rank.Open());
    for (int round = 0; round < 3; ++round) {
      for (const uint32_t tensor : {0u, 1u}) {  // a large one and a bundled one
        rank.ChangeWeights(tensor, 0.5f);
        if (rank.rank() == 0) rank.Put(tensor);
        const absl::Status followed = rank.session().Wait(rank.session().FollowPut(tensor));
        ASSERT_TRUE(followed.ok()) << followed;
      }
      ASSERT_NO_FATAL_FAILURE(rank.Forward()) << "after round " << round;
    }
    rank.Close();
  });
}

TEST_F(RanksTest, AWeightThatOnlyTheFirstOverwritesIsAnErrorOnceTheOthersStep) {
  const auto put = [](client::Session& first) {
    return first.Wait(first.Put(0, 0, proto::kExtentElements, proto::kRegionFixedBytes));
  };
  ExpectErrorBesideAStep(0, put, "rank 0 writes \"embedding\" in place while rank 1");
}

TEST_F(RanksTest, AWeightThatOnlyALaterRankOverwritesIsAnErrorOnceTheFirstSteps) {
  const auto follow = [](client::Session& later) { return later.Wait(later.FollowPut(0)); };
  ExpectErrorBesideAStep(1, follow,
                         "rank 1 writes \"embedding\" in place while rank 0 takes a step");
}

TEST_F(RanksTest, AWeightOfWhichRanksMakeDifferentValuesIsAnErrorOfAll) {
  const Ranks ranks = Launch(2);
  OnAll(ranks, [](Job& rank) {
    ASSERT_NO_FATAL_FAILURE(rank.Open());
    const absl::Status changed =
        rank.session().Wait(rank.session().FollowPut(0, /*digest=*/1 + rank.rank()));
    ExpectError(changed, ErrorId::kWeightOfRanks, "ranks 0 and 1 change \"embedding\" in place");
    ASSERT_NO_FATAL_FAILURE(rank.Forward());
    rank.Close();
  });
}

// ---- Joining -----------------------------------------------------------------------------------

TEST_F(RanksTest, RanksThatWantDifferentThingsAreToldTheFirstOne) {
  NodeDaemon node;
  const std::string run_id = NewRunId();
  const auto first = Connect(WorldOf(0, 2, run_id));
  const auto second = Connect(WorldOf(1, 2, run_id));
  const Job wanted(pool_, "job", VariantOf(0, 2, run_id));
  std::thread waiting([&] { EXPECT_TRUE(first->OpenJob(wanted.Options()).ok()); });
  client::JobOptions options = wanted.Options();
  options.world.rank = 1;
  const auto expect = [&](const std::function<void(client::JobOptions&)>& change, ErrorId id,
                          const std::string& text) {
    client::JobOptions changed = options;
    change(changed);
    ExpectError(second->OpenJob(changed).status(), id, text);
  };
  WaitForRanks(1);
  expect([](auto& changed) { changed.ram_bytes *= 2; }, ErrorId::kRanksDiffer, "ram is 134217728");
  expect([](auto& changed) { changed.durability = "checkpoint:2"; }, ErrorId::kRanksDiffer,
         "durability is step in rank 0 and checkpoint:2 in rank 1");
  expect([](auto& changed) { changed.gradients_reduced = false; }, ErrorId::kRanksDiffer,
         "gradients reduced by the trainer");
  expect(
      [](auto& changed) {
        changed.world.world_size = 3;
        changed.world.local_world_size = 3;
      },
      ErrorId::kRanksDiffer, "world size is 2 in rank 0 and 3 in rank 1");
  expect([](auto& changed) { changed.world.rank = 0; }, ErrorId::kRanksDiffer,
         "both are rank 0 of 2");
  expect([](auto& changed) { changed.world.rank = 2; }, ErrorId::kBadValue, "rank 2 in a world");
  expect([](auto& changed) { changed.world.world_size = 0; }, ErrorId::kBadValue,
         "a world of 0 ranks");
  expect([](auto& changed) { changed.world.world_size = 1000; }, ErrorId::kBadValue,
         "a world of 1000 ranks");
  expect([](auto& changed) { changed.world.local_world_size = 1; }, ErrorId::kBadValue,
         "several nodes");
  EXPECT_TRUE(second->OpenJob(options).ok()) << "who was refused may try again";
  waiting.join();
}

TEST_F(RanksTest, RanksWithDifferentModelsOrPlansFormatNothing) {
  NodeDaemon node;
  const std::string run_id = NewRunId();
  const Job job(pool_, "job", VariantOf(0, 2, run_id));
  const std::unique_ptr<client::Session> sessions[] = {Connect(WorldOf(0, 2, run_id)),
                                                       Connect(WorldOf(1, 2, run_id))};
  const auto both = [&](const std::function<absl::Status(uint32_t rank)>& call) {
    absl::Status other;
    std::thread thread([&] { other = call(1); });
    const absl::Status status = call(0);
    thread.join();
    EXPECT_EQ(status, other) << "both are told the same";
    return status;
  };
  ASSERT_TRUE(both([&](uint32_t rank) {
                client::JobOptions options = job.Options();
                options.world.rank = rank;
                return sessions[rank]->OpenJob(options).status();
              }).ok());
  const auto seal = [&](const std::function<void(std::vector<proto::Tensor>&)>& change,
                        const kernels::OptimizerSpec& optimizer) {
    return both([&](uint32_t rank) {
      std::vector<proto::Tensor> tensors = job.catalogue().tensors;
      if (rank == 1) change(tensors);
      const absl::Status declared = sessions[rank]->DeclareTensors(tensors);
      if (!declared.ok()) return declared;
      return sessions[rank]->Seal(rank == 1 ? optimizer : kAdamW, job.plan(), job.pins_offset(),
                                  nullptr);
    });
  };
  ExpectError(seal([](auto& tensors) { tensors[5].shape = {70002}; }, kAdamW),
              ErrorId::kRanksDiffer, "\"mlp\" is bf16 of shape [70001], trainable in rank 0");
  ExpectError(seal([](auto&) {}, kMomentum), ErrorId::kRanksDiffer, "optimizer");
  EXPECT_FALSE(std::filesystem::exists(pool_ + "/job.offload"));
  const absl::Status sealed = seal([](auto&) {}, kAdamW);
  EXPECT_TRUE(sealed.ok()) << sealed << ": who was refused may try again";
}

// As by a launcher that starts its ranks again at once: the daemon of the last ones is just ending,
// and removes the directory that the next ones meet in.
TEST_F(RanksTest, LaunchesOfOneNameThatFollowEachOtherHaveOneDaemonEach) {
  const std::string run_id = NewRunId();
  for (int launch = 0; launch < 25; ++launch) {
    std::array<std::unique_ptr<client::Session>, 3> sessions;
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < sessions.size(); ++rank) {
      threads.emplace_back([&, rank] {
        auto session = client::Session::Connect(
            {.only_private = true, .world = WorldOf(rank, sessions.size(), run_id)});
        ASSERT_TRUE(session.ok()) << session.status();
        sessions[rank] = *std::move(session);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& session : sessions) {
      ASSERT_NE(session, nullptr) << "launch " << launch;
      EXPECT_EQ(session->daemon_pid(), sessions.front()->daemon_pid()) << "launch " << launch;
    }
  }
}

TEST_F(RanksTest, AMissingRankIsNamedAfterABoundedWait) {
  const ScopedVariable timeout("OFFLOADD_JOIN_TIMEOUT", "0.5");
  const Ranks ranks = Launch(4);
  OnAll(ranks, [](Job& rank) {
    if (rank.rank() == 1 || rank.rank() == 2) return;
    auto session = client::Session::Connect({.only_private = true, .world = rank.Options().world});
    ASSERT_TRUE(session.ok()) << session.status();
    ExpectError((*session)->OpenJob(rank.Options()).status(), ErrorId::kRankMissing,
                "waited in vain for ranks 1 and 2 of 4");
  });
}

// Nobody knows whether it still comes, but whom the others wait for.
TEST_F(RanksTest, AfterTenSecondsItIsSaidWhichRankIsWaitedFor) {
  const ScopedVariable timeout("OFFLOADD_JOIN_TIMEOUT", "11");
  const Ranks ranks = Launch(2);
  client::JobOptions options = ranks[1]->Options();
  std::vector<std::string> said;
  options.on_wait = [&said](const std::string& text) { said.push_back(text); };
  auto session = client::Session::Connect({.only_private = true, .world = options.world});
  ASSERT_TRUE(session.ok()) << session.status();
  ExpectError((*session)->OpenJob(options).status(), ErrorId::kRankMissing,
              "waited in vain for rank 0 of 2");
  EXPECT_EQ(said, (std::vector<std::string>{"rank 1 waits for rank 0 of 2"}));
}

TEST_F(RanksTest, ALaunchDoesNotJoinAJobOfAnEarlierOneThatStillRuns) {
  NodeDaemon node;
  const Ranks ranks = Launch(2);
  for (const std::unique_ptr<Job>& rank : ranks) rank->UseNodeDaemon();
  OnAll(ranks, [](Job& rank) { ASSERT_NO_FATAL_FAILURE(rank.Open()); });
  client::JobOptions late = ranks[0]->Options();
  late.world.run_id = "another";
  ExpectError(Connect(late.world)->OpenJob(late).status(), ErrorId::kStoreLocked,
              absl::StrCat("of launch ", ranks[0]->Options().world.run_id, ", not of another"));
  late.world = {};
  late.gradients_reduced = false;
  ExpectError(Connect({})->OpenJob(late).status(), ErrorId::kStoreLocked, "is in use by process");
  OnAll(ranks, [](Job& rank) { rank.Close(); });
}

// The user is part of what tells jobs apart: each waits for the ranks of its own.
TEST_F(RanksTest, ARankOfAnotherUserDoesNotJoin) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to be somebody else";
  const ScopedVariable timeout("OFFLOADD_JOIN_TIMEOUT", "0.5");
  NodeDaemon node({"--allow-uid", std::to_string(kOtherUser), "--pool", pool_});
  const std::filesystem::path folder =
      std::filesystem::path(getenv("OFFLOADD_SOCKET")).parent_path();
  std::filesystem::permissions(folder, std::filesystem::perms(0711));
  const std::string run_id = NewRunId();
  const pid_t other = Spawn({"other", pool_, run_id});
  const auto options = Job(pool_, "job", VariantOf(0, 2, run_id)).Options();
  ExpectError(Connect(options.world)->OpenJob(options).status(), ErrorId::kRankMissing,
              "waited in vain for rank 1 of 2");
  int status = 0;
  ASSERT_EQ(waitpid(other, &status, 0), other);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// ---- Steps that differ, and the end ------------------------------------------------------------

TEST_F(RanksTest, StepsThatDifferAreTakenByNobodyAndTheDifferenceIsNamed) {
  const Ranks ranks = Launch(2);
  OnAll(ranks, [](Job& rank) {
    ASSERT_NO_FATAL_FAILURE(rank.Open());
    client::StepCommand step;
    step.step = 1 + rank.rank();
    ExpectError(rank.session().Step(step), ErrorId::kRanksDiffer,
                "rank 0 is at step 1 and rank 1 at step 2");
    ASSERT_NO_FATAL_FAILURE(rank.Step());
    ASSERT_NO_FATAL_FAILURE(rank.ExpectEqual());
    rank.Close();
  });
}

TEST_F(RanksTest, ExchangesOfDifferentNumbersAreTold) {
  const Ranks ranks = Launch(2);
  OnAll(ranks, [](Job& rank) { ASSERT_NO_FATAL_FAILURE(rank.Open()); });
  // One that is refused counts, too.
  EXPECT_FALSE(ranks[1]->session().Exchange(std::string((1 << 20) + 1, 'x')).ok());
  OnAll(ranks, [](Job& rank) {
    ExpectError(rank.session().Exchange("").status(), ErrorId::kRanksDiffer,
                "rank 0 exchanges for the 0. time and rank 1 for the 1. time");
    rank.Close();
  });
}

TEST_F(RanksTest, AnExchangeOfOneRankIsAnErrorOnceTheOthersStep) {
  const auto exchange = [](client::Session& first) { return first.Exchange("").status(); };
  ExpectErrorBesideAStep(0, exchange,
                         "rank 0 waits for all ranks (in Exchange() or LoadWeights()) while rank 1 "
                         "takes a step without having come to that");
}

// A rank whose ring is full waits so, too.
TEST_F(RanksTest, AnExchangeOfOneRankIsAnErrorOnceTheOthersPartsWaitForItsGradients) {
  const ScopedVariable timeout("OFFLOADD_ROOM_TIMEOUT", "1");
  const std::string run_id = NewRunId();
  Ranks ranks;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    Variant variant = VariantOf(rank, 2, run_id);
    variant.sums = true;
    ranks.push_back(std::make_unique<Job>(pool_, "job", variant));
  }
  OnAll(ranks, [](Job& rank) {
    ASSERT_NO_FATAL_FAILURE(rank.Open());
    if (rank.rank() == 0) {
      ExpectError(rank.session().Exchange("").status(), ErrorId::kRanksDiffer,
                  "rank 0 waits for all ranks (in Exchange() or LoadWeights()) while rank 1 waits "
                  "for gradients without having come to that");
    }
    ASSERT_NO_FATAL_FAILURE(rank.Step());
    ASSERT_NO_FATAL_FAILURE(rank.Forward());
    ASSERT_NO_FATAL_FAILURE(rank.ExpectEqual());
    rank.Close();
  });
}

TEST_F(RanksTest, ARankThatClosesWhileOthersStepIsToldToThem) {
  const Ranks ranks = Launch(3);
  OnAll(ranks, [](Job& rank) {
    ASSERT_NO_FATAL_FAILURE(rank.Open());
    ASSERT_NO_FATAL_FAILURE(rank.Step());
  });
  OnAll(ranks, [](Job& rank) {
    if (rank.rank() == 2) {
      EXPECT_TRUE(rank.session().CloseJob().ok());
      return;
    }
    client::StepCommand step;
    step.step = 2;
    ExpectError(rank.session().Step(step), ErrorId::kRankLost, "rank 2 (process");
    ASSERT_NO_FATAL_FAILURE(rank.ExpectEqual()) << "what needs nobody else goes on";
    rank.Close();
  });
}

TEST_F(RanksTest, ARankThatBreaksTheProtocolStopsItsJobAndNoOther) {
  NodeDaemon node;
  const Ranks ranks = Launch(2);
  Job neighbour(pool_, "neighbour", {.dtype = Dtype::kFloat32});
  neighbour.UseNodeDaemon();
  ASSERT_NO_FATAL_FAILURE(neighbour.Open());
  for (const std::unique_ptr<Job>& rank : ranks) rank->UseNodeDaemon();
  OnAll(ranks, [](Job& rank) {
    ASSERT_NO_FATAL_FAILURE(rank.Open());
    ASSERT_NO_FATAL_FAILURE(rank.Step());
    ASSERT_TRUE(rank.session().WaitDurable().ok());
  });
  OnAll(ranks, [](Job& rank) {
    if (rank.rank() == 1) {
      reinterpret_cast<proto::RegionHeader*>(rank.session().region())
          ->submission_tail.fetch_add(1u << 20);
    }
    const absl::Status status = rank.session().Step(StepByCall(2));
    if (rank.rank() == 0) {
      ExpectError(status, ErrorId::kRankLost, "has broken the protocol: ");
      ExpectError(status, ErrorId::kRankLost, "rank 1 (process");
    } else {
      EXPECT_FALSE(status.ok());
    }
    rank.Leave();
  });
  ASSERT_NO_FATAL_FAILURE(neighbour.Step());
  ASSERT_NO_FATAL_FAILURE(neighbour.Forward());
  ASSERT_NO_FATAL_FAILURE(neighbour.ExpectEqual());
  neighbour.Close();
  Job one(pool_, "job", {.dtype = Dtype::kBFloat16, .state_resident = 1});
  one.Follow(*ranks[0]);
  ASSERT_NO_FATAL_FAILURE(one.Open());
  EXPECT_EQ(one.info().step, 1u);
  ASSERT_NO_FATAL_FAILURE(one.ExpectEqual());
  one.Close();
}

// ---- Death -------------------------------------------------------------------------------------

// Another user's process that calls itself a rank of the launch.
int RunOtherUser(const std::string& pool, const std::string& run_id) {
  if (setuid(kOtherUser) != 0) return 2;
  const Job job(pool, "job", VariantOf(1, 2, run_id));
  auto session = client::Session::Connect({.allow_private = false});
  if (!session.ok()) return 3;
  const absl::Status opened = (*session)->OpenJob(job.Options()).status();
  std::fprintf(stderr, "another user: %s\n", std::string(opened.message()).c_str());
  return ErrorIdOf(opened) == ErrorId::kRankMissing ? 0 : 4;
}

// Takes steps until it is told that a rank is gone.
int RunRank(const std::string& pool, uint32_t rank, uint32_t world_size, const std::string& run_id,
            uint64_t first_step) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Job job(pool, "job", VariantOf(rank, world_size, run_id));
  if (first_step > 0) job.SkipTo(first_step);
  absl::Status status = job.TryOpen();
  if (status.ok() && job.info().step != first_step) return 3;
  while (status.ok()) status = job.NumberedStep();
  std::fprintf(stderr, "rank %u: %s\n", rank, std::string(status.message()).c_str());
  // One that is killed before it has joined is missing.
  return ErrorIdOf(status) == ErrorId::kRankLost || ErrorIdOf(status) == ErrorId::kRankMissing ? 0
                                                                                               : 4;
}

class KilledRanksTest : public RanksTest {
 protected:
  std::vector<pid_t> Start(uint32_t world_size, uint64_t first_step) {
    const std::string run_id = NewRunId();
    std::vector<pid_t> pids;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      pids.push_back(Spawn({"rank", pool_, std::to_string(rank), std::to_string(world_size), run_id,
                            std::to_string(first_step)}));
    }
    return pids;
  }
  // The others are told, and end by themselves.
  static void ExpectTold(std::vector<pid_t> pids, uint32_t killed) {
    for (uint32_t rank = 0; rank < pids.size(); ++rank) {
      int status = 0;
      ASSERT_EQ(waitpid(pids[rank], &status, 0), pids[rank]);
      if (rank == killed) continue;
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
          << "rank " << rank << " ended with " << status;
    }
  }
};

TEST_F(KilledRanksTest, AKilledRankEndsTheOthersAtAWholeStepAndAnyNumberOfRanksGoesOn) {
  const ScopedVariable timeout("OFFLOADD_JOIN_TIMEOUT", "3");
  Random random(20261121);
  const Variant variant = {.dtype = Dtype::kBFloat16, .state_resident = 1};
  Job model(pool_, "job", variant);
  const std::vector<uint32_t> world_sizes = {2, 3, 2, 4};
  uint64_t step = 0;
  // Where the machine is slow, until one of them was given the time for a step.
  for (size_t launch = 0; launch < world_sizes.size() || step == 0; ++launch) {
    const uint32_t world_size = world_sizes[launch % world_sizes.size()];
    SCOPED_TRACE(absl::StrCat(world_size, " ranks from step ", step));
    const std::vector<pid_t> pids = Start(world_size, step);
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1000 + 500 * launch + random.Below(2000)));
    const auto killed = static_cast<uint32_t>(random.Below(world_size));
    ASSERT_EQ(kill(pids[killed], SIGKILL), 0);
    ASSERT_NO_FATAL_FAILURE(ExpectTold(pids, killed));
    if (HasFailure()) return;
    if (!std::filesystem::exists(pool_ + "/job.offload")) continue;  // it was not made yet
    Job one(pool_, "job", variant);
    ASSERT_NO_FATAL_FAILURE(one.Open());
    EXPECT_GE(one.info().step, step);
    step = one.info().step;
    ASSERT_NO_FATAL_FAILURE(model.SkipTo(step));
    one.Follow(model);
    ASSERT_NO_FATAL_FAILURE(one.ExpectEqual());
    one.Close();
  }
}

}  // namespace
}  // namespace offload

// Beside the tests the program is the rank that they kill.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc == 7 && std::string(argv[1]) == "rank") {
    return offload::RunRank(argv[2], static_cast<uint32_t>(std::stoul(argv[3])),
                            static_cast<uint32_t>(std::stoul(argv[4])), argv[5],
                            std::stoull(argv[6]));
  }
  if (argc == 4 && std::string(argv[1]) == "other") return offload::RunOtherUser(argv[2], argv[3]);
  return RUN_ALL_TESTS();
}

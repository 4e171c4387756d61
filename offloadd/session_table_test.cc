#include "offloadd/session_table.h"

#include <unistd.h>

#include "gtest/gtest.h"
#include "offloadd/session_fixture.h"

namespace offload::daemon {
namespace {

class SessionTableTest : public testing::Test {
 protected:
  SessionTableTest() {
    table_.Add(first_.get());
    table_.Add(second_.get());
  }

  SessionTable table_;
  SessionFixture first_{{.id = 1}};
  SessionFixture second_{{.id = 2}, [](proto::Peer& peer) { peer.uid += 1; }};
};

TEST_F(SessionTableTest, SessionsAreFoundByTokenAndCountedByProcessAndUser) {
  EXPECT_EQ(table_.size(), 2u);
  EXPECT_EQ(table_.All().size(), 2u);
  EXPECT_EQ(table_.FindByToken(second_->token()), second_.get());
  EXPECT_EQ(table_.FindByToken(proto::Token{}), nullptr);
  EXPECT_EQ(table_.CountOfProcess(getpid()), 2u);
  EXPECT_EQ(table_.CountOfProcess(getpid() + 1), 0u);
  EXPECT_EQ(table_.CountOfUser(second_->peer().uid), 1u);
}

TEST_F(SessionTableTest, OneThatWasRemovedIsNotFoundAndCannotBeRemovedAgain) {
  EXPECT_EQ(table_.Remove(1), first_.get());
  EXPECT_EQ(table_.Remove(1), nullptr);
  EXPECT_EQ(table_.FindByToken(first_->token()), nullptr);
}

}  // namespace
}  // namespace offload::daemon

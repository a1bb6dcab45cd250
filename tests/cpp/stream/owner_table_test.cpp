#include <atomic>
#include <thread>

#include "ring_fixture.h"

namespace nybble {
namespace {

class OwnerTable : public ::testing::Test {
 protected:
  OwnerTable() {
    const std::vector<std::string> weights = {"q_proj", "k_proj"};
    first_ = register_owner("L1", weights);
    second_ = register_owner("L5", weights);
    const ByteRange ranges[] = {{packed_, sizeof(packed_)}, {scales_, sizeof(scales_)}};
    slot_ = register_slot(ranges);
  }
  ~OwnerTable() override {
    unregister_slot(slot_);
    forget_owner(first_);
    forget_owner(second_);
  }
  std::string check(int64_t uid, std::vector<const void*> pointers) {
    return error_of(ErrorKind::kStaleWeight, [&] { verify_owner(uid, pointers.data(), static_cast<int>(pointers.size())); });
  }

  std::byte packed_[64];
  std::byte between_[64];
  std::byte scales_[16];
  int64_t first_ = 0;
  int64_t second_ = 0;
  int64_t slot_ = 0;
};

TEST_F(OwnerTable, PassesOnlyTheOwnersWeightsInsideTheSlot) {
  begin_fill(slot_);
  set_owner(slot_, first_);
  EXPECT_EQ(check(first_, {packed_, scales_, nullptr}), "");
  EXPECT_EQ(check(first_ + 1, {packed_ + 63, scales_ + 15}), "");
  EXPECT_EQ(check(first_, {}), "");
  EXPECT_EQ(check(second_, {packed_}).find("weight L5.q_proj expected, slot holds L1"), 0u);
  EXPECT_NE(check(0, {packed_}), "");
  EXPECT_NE(check(-1, {packed_}), "");
}

TEST_F(OwnerTable, EveryPointerIsChecked) {
  set_owner(slot_, first_);
  std::byte elsewhere[8];
  for (const std::vector<const void*>& pointers :
       std::vector<std::vector<const void*>>{{packed_, elsewhere}, {elsewhere, scales_}, {packed_, packed_ + 64}, {packed_ - 1}}) {
    const std::string text = check(first_, pointers);
    EXPECT_EQ(text.find("weight L1.q_proj left the ring"), 0u) << text;
  }
}

TEST_F(OwnerTable, NobodyOwnsASlotFromBeginFillUntilSetOwner) {
  set_owner(slot_, first_);
  const uint64_t before = slot_owner(slot_).generation;
  begin_fill(slot_);
  EXPECT_EQ(slot_owner(slot_).owner, kNobody);
  EXPECT_EQ(slot_owner(slot_).generation, before + 1);
  EXPECT_EQ(check(first_, {packed_}).find("weight L1.q_proj expected, slot holds nothing"), 0u);
  set_owner(slot_, second_ + 1);
  EXPECT_EQ(slot_owner(slot_).owner, second_);
  EXPECT_EQ(check(second_, {packed_}), "");
}

TEST_F(OwnerTable, ReleaseKeepsTheOwnerAndAReadAfterItIsReported) {
  set_owner(slot_, first_);
  release_slot(slot_);
  EXPECT_FALSE(begin_fill(slot_));
  set_owner(slot_, first_);
  release_slot(slot_);
  EXPECT_EQ(check(first_, {packed_}), "");
  EXPECT_TRUE(begin_fill(slot_));
}

TEST_F(OwnerTable, RefusesOverlapsEmptyRangesAndUnknownSlots) {
  for (const ByteRange& range : {ByteRange{packed_ + 63, 1}, ByteRange{packed_ - 1, 2}, ByteRange{nullptr, 8}, ByteRange{between_, 0}}) {
    EXPECT_NE(error_of(ErrorKind::kValue, [&] { register_slot({&range, 1}); }), "");
  }
  EXPECT_NE(error_of(ErrorKind::kValue, [] { register_slot({}); }), "");
  EXPECT_NE(error_of(ErrorKind::kValue, [] { begin_fill(int64_t{1} << 40); }), "");
  const ByteRange beside{between_, 64};
  const int64_t slot = register_slot({&beside, 1});
  set_owner(slot, first_);
  EXPECT_EQ(check(first_, {between_}), "");
  unregister_slot(slot);
  EXPECT_EQ(check(first_, {between_}).find("weight L1.q_proj left the ring"), 0u);
}

TEST_F(OwnerTable, UidsAreNeverReusedAndForgottenOnesStillFail) {
  const int64_t gone = register_owner("gone", {});
  forget_owner(gone);
  EXPECT_GT(register_owner("next", {}), gone);
  set_owner(slot_, first_);
  EXPECT_NE(check(gone, {packed_}).find("(not registered) expected, slot holds L1"), std::string::npos);
  EXPECT_EQ(weight_name(first_ + 1), "L1.k_proj");
  EXPECT_EQ(weight_name(first_ + 2), "L1");
}

// Readers verify one slot while a writer publishes hundreds of snapshots and flips the owner of another.
TEST_F(OwnerTable, ReadersNeverFailWhileOtherSlotsComeAndGo) {
  set_owner(slot_, first_);
  std::atomic<bool> stop{false};
  std::atomic<int64_t> passed{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; i++) {
    readers.emplace_back([&] {
      const void* const pointers[] = {packed_, scales_};
      while (!stop) {
        verify_owner(first_, pointers, 2);
        passed++;
      }
    });
  }
  while (passed == 0) std::this_thread::yield();
  for (int round = 0; round < 300; round++) {
    const ByteRange range{between_, 64};
    const int64_t slot = register_slot({&range, 1});
    set_owner(slot, second_);
    begin_fill(slot);
    unregister_slot(slot);
  }
  stop = true;
  for (auto& reader : readers) reader.join();
  EXPECT_GT(passed, 0);
}

}  // namespace
}  // namespace nybble

// Tune tables as text: what is written is read back, what is wrong is refused with its place, and the active one is what plans follow.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "nybble/error.h"
#include "nybble/tune.h"

namespace nybble {
namespace {

const DeviceModel kCard = {"A card", 86, 28, 4 << 20, 101376};

TuneEntry entry(Direction direction, int64_t m_min, int64_t m_max, LinearPath path) {
  return {kCard.name, direction, DType::kBFloat16, 4096, 14336, m_min, m_max, path};
}

TuneTable sample() {
  TuneTable table;
  table.add(entry(Direction::kForward, 1, 8, LinearPath::kRow));
  table.add(entry(Direction::kForward, 9, 700, LinearPath::kPortable));
  table.add(entry(Direction::kGradInput, 1, 700, LinearPath::kDequant));
  return table;
}

LinearProblem problem(int64_t m, Direction direction) {
  LinearProblem p;
  p.m = m, p.n = 4096, p.k = 14336, p.direction = direction;
  return p;
}

// The message of the error that reading `text` must give.
std::string refusal(const std::string& text) {
  try {
    tune_table_from_json(text, "there");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat) << error.what();
    return error.what();
  }
  return "accepted";
}

std::string one_entry(const std::string& change_from = "", const std::string& change_to = "") {
  std::string text =
      R"({"nybble_tune": 1, "entries": [{"device": "A card", "direction": "forward", "dtype": "bfloat16", "n": 64, "k": 64, )"
      R"("m_min": 1, "m_max": 8, "path": "row"}]})";
  const size_t at = change_from.empty() ? std::string::npos : text.find(change_from);
  EXPECT_TRUE(change_from.empty() || at != std::string::npos) << change_from;
  return at == std::string::npos ? text : text.replace(at, change_from.size(), change_to);
}

TEST(TuneFile, WhatIsWrittenIsReadBack) {
  const TuneTable table = sample(), read = tune_table_from_json(to_json(table), "text");
  EXPECT_EQ(to_json(read), to_json(table));
  EXPECT_EQ(read.hash(), table.hash());
  EXPECT_EQ(read.entries().size(), 3u);
  EXPECT_EQ(tune_table_from_json(to_json(TuneTable{}), "text").hash(), 0u);
}

TEST(TuneFile, TimesBesideTheEntriesChangeNothing) {
  const std::string text = one_entry("\"entries\"", "\"measured\": [{\"us\": {\"row\": 3.5}}], \"entries\"");
  EXPECT_EQ(tune_table_from_json(text, "text").hash(), tune_table_from_json(one_entry(), "text").hash());
}

TEST(TuneFile, WhatIsWrongIsRefusedWithItsPlace) {
  ASSERT_EQ(refusal(one_entry()), "accepted");
  const struct {
    std::string text, expected;
  } rows[] = {
      {"", "not JSON"},
      {one_entry("}]}", "}]"), "not JSON"},
      {"[]", "array, expected an object"},
      {"{}", "no \"nybble_tune\""},
      {one_entry("\"nybble_tune\": 1", "\"nybble_tune\": 2"), "version 2, this build reads 1"},
      {one_entry("\"nybble_tune\": 1", "\"nybble_tune\": \"1\""), "expected an integer"},
      {one_entry("\"entries\"", "\"surplus\": 1, \"entries\""), "key \"surplus\" is not known"},
      {R"({"nybble_tune": 1, "entries": {}})", "expected an array"},
      {one_entry("\"path\": \"row\"", "\"path\": \"fast\""), "entry 0: path \"fast\", expected one of dequant, row"},
      {one_entry("\"path\": \"row\"", "\"path\": \"cpu\""), "path \"cpu\""},
      {one_entry("\"path\": \"row\"", "\"path\": 3"), "expected a string"},
      {one_entry(", \"path\": \"row\"", ""), "no \"path\""},
      {one_entry("\"direction\": \"forward\"", "\"direction\": \"back\""), "direction \"back\""},
      {one_entry("\"dtype\": \"bfloat16\"", "\"dtype\": \"float32\""), "dtype \"float32\""},
      {one_entry("\"device\": \"A card\"", "\"device\": \"\""), "without a device name"},
      {one_entry("\"m_max\": 8", "\"m_max\": 0"), "m 1..0"},
      {one_entry("\"m_max\": 8", "\"m_max\": 8.5"), "expected an integer"},
      {one_entry("\"path\": \"row\"", "\"extra\": 0, \"path\": \"row\""), "key \"extra\" is not known"},
      {one_entry("}]}",
                 "}, {\"device\": \"A card\", \"direction\": \"forward\", \"dtype\": \"bfloat16\", \"n\": 64, \"k\": 64, \"m_min\": 8, "
                 "\"m_max\": 9, \"path\": \"dequant\"}]}"),
       "entry 1: tune entry for m 8..9 overlaps"},
  };
  for (const auto& row : rows) {
    const std::string found = refusal(row.text);
    EXPECT_NE(found.find(row.expected), std::string::npos) << row.text << "\n  gave: " << found;
    EXPECT_NE(found.find("tune table there"), std::string::npos) << found;
  }
}

TEST(TuneFile, PlansFollowTheActiveTableUntilItIsEmpty) {
  set_active_tune_table(sample());
  ASSERT_NE(active_tune_table(), nullptr);
  const LinearPlan forward = plan_linear(problem(500, Direction::kForward), kCard, active_tune_table());
  EXPECT_EQ(forward.path, LinearPath::kPortable);
  EXPECT_EQ(forward.tune_hash, sample().hash());
  EXPECT_EQ(plan_linear(problem(500, Direction::kGradInput), kCard, active_tune_table()).path, LinearPath::kDequant);
  const TuneTable* before = active_tune_table();
  set_active_tune_table(TuneTable{});
  EXPECT_EQ(active_tune_table(), nullptr);
  EXPECT_EQ(plan_linear(problem(500, Direction::kGradInput), kCard, active_tune_table()).tune_hash, 0u);
  EXPECT_EQ(before->entries().size(), 3u) << "a plan may still read it";
}

// The environment is read once a process, so each case is a process of its own.
using TuneFileDeathTest = testing::Test;

void exit_with_active_path(const char* file) {
  setenv("NYBBLE_TUNE", file, 1);
  for (int attempt = 0; attempt < 2; attempt++) {
    try {
      const TuneTable* table = active_tune_table();
      if (table == nullptr) std::exit(10);
      const LinearPlan plan = plan_linear(problem(500, Direction::kGradInput), kCard, table);
      std::exit(plan.path == LinearPath::kDequant && plan.tune_hash == table->hash() ? 11 : 12);
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      if (attempt == 1) std::exit(error.kind() == ErrorKind::kIo ? 13 : 14);
    }
  }
}

TEST(TuneFileDeathTest, TheFileThatTheEnvironmentNamesIsActiveAndABadOneIsAnErrorEveryTime) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::string good = testing::TempDir() + "/good_tune.json", bad = testing::TempDir() + "/bad_tune.json";
  std::ofstream(good) << to_json(sample());
  std::ofstream(bad) << "{}";
  EXPECT_EXIT(exit_with_active_path(good.c_str()), testing::ExitedWithCode(11), "");
  EXPECT_EXIT(exit_with_active_path(""), testing::ExitedWithCode(10), "");
  EXPECT_EXIT(exit_with_active_path("no/such/file"), testing::ExitedWithCode(13), "NYBBLE_TUNE names no/such/file");
  EXPECT_EXIT(exit_with_active_path(bad.c_str()), testing::ExitedWithCode(14), "no \"nybble_tune\"");
}

}  // namespace
}  // namespace nybble

#include "core/support.h"

#include <gtest/gtest.h>

namespace nybble {
namespace {

constexpr const char* kWheelTargets = "75 80 86 89 90a 100 120";

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Support, ADriverOfTheSameMajorVersionOrNewerIsTaken) {
  for (const int driver : {13000, 13020, 14010}) EXPECT_EQ(refusal_of_driver(13000, driver), "") << driver;
  EXPECT_EQ(refusal_of_driver(13020, 13000), "") << "minor versions are compatible";
  EXPECT_EQ(refusal_of_driver(12080, 12020), "");
}

TEST(Support, AnOlderDriverIsNamedWithWhatToDo) {
  EXPECT_EQ(refusal_of_driver(13000, 12080),
            "the NVIDIA driver takes CUDA up to 12.8, but this nybble is built with CUDA 13.0; update the driver (580 or newer), or build "
            "nybble with a CUDA 12 toolkit");
  EXPECT_TRUE(contains(refusal_of_driver(12080, 11040), "(525 or newer)"));
  EXPECT_TRUE(contains(refusal_of_driver(99000, 13000), "(a newer one)"));
  EXPECT_TRUE(contains(refusal_of_driver(13000, 0), "no NVIDIA driver is loaded"));
}

TEST(Support, ACardRunsCodeOfItsOwnMajorVersionOrThePtxOfAnOlderOne) {
  struct Case {
    const char* targets;
    int sm;
    bool runs;
  };
  const Case cases[] = {
      {kWheelTargets, 75, true},
      {kWheelTargets, 80, true},
      {kWheelTargets, 87, true},
      {kWheelTargets, 90, true},
      {kWheelTargets, 103, true},
      {kWheelTargets, 120, true},
      {kWheelTargets, 121, true},
      {kWheelTargets, 130, true},
      {kWheelTargets, 70, false},
      {kWheelTargets, 61, false},
      {kWheelTargets, 110, false},
      {"80 90a", 75, false},
      {"80 90a", 89, true},
      {"80 90a", 100, true},
      {"80 90a", 120, true},
      {"90a", 80, false},
      {"86", 80, false},
      {"86", 90, true},
      {"", 90, false},
  };
  for (const Case& c : cases) EXPECT_EQ(refusal_of_gpu("card", c.sm, c.targets).empty(), c.runs) << c.targets << ", " << c.sm;
}

TEST(Support, ACardWithoutCodeIsNamedWithWhatTheBuildHas) {
  EXPECT_EQ(refusal_of_gpu("Tesla V100", 70, "75 80 90a"),
            "Tesla V100 has compute capability 7.0, but this nybble has code for 7.5, 8.0, 9.0 only; use another GPU or the CPU, or build "
            "with that target in NYBBLE_CUDA_TARGETS where the CUDA toolkit still has it");
}

TEST(Support, CardsBelow80GetANoteAndOthersNone) {
  EXPECT_EQ(note_on_gpu("Tesla T4", 75),
            "Tesla T4 has compute capability 7.5, and the fused multiply needs 8.0; here every multiply dequantises the weight first (the "
            "numbers are right, the speed is that of dequantising)");
  for (const int sm : {80, 86, 90, 120}) EXPECT_EQ(note_on_gpu("card", sm), "") << sm;
}

TEST(Support, ACpuWithoutAvx2GetsANote) {
  EXPECT_TRUE(contains(note_on_cpu(false), "no AVX2"));
  EXPECT_EQ(note_on_cpu(true), "");
}

}  // namespace
}  // namespace nybble

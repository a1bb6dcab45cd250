#include "store/names.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace nybble {
namespace {

TEST(Names, NumbersSortAsNumbers) {
  const std::vector<std::string> sorted = {"a", "a.1", "a.01", "a.2.x", "a.10.b", "a.10.c", "layers.9.q", "layers.10.k", "lm_head", "z"};
  for (size_t i = 0; i < sorted.size(); i++) {
    for (size_t j = 0; j < sorted.size(); j++) {
      if (sorted[i] == "a.1" || sorted[i] == "a.01" || sorted[j] == "a.1" || sorted[j] == "a.01") continue;  // the next test
      EXPECT_EQ(natural_less(sorted[i], sorted[j]), i < j) << sorted[i] << " " << sorted[j];
    }
  }
}

TEST(Names, LeadingZerosKeepTheOrderStrict) {
  EXPECT_NE(natural_less("a.01", "a.1"), natural_less("a.1", "a.01"));
  EXPECT_FALSE(natural_less("a.1", "a.1"));
}

TEST(Names, LayerEndsAtTheFirstNumber) {
  EXPECT_EQ(layer_of("model.layers.10.mlp.experts.3.up_proj.weight"), "model.layers.10");
  EXPECT_EQ(layer_of("transformer.h.0.attn.weight"), "transformer.h.0");
  EXPECT_EQ(layer_of("model.embed_tokens.weight"), "");
  EXPECT_EQ(layer_of("lm_head.weight"), "");
  EXPECT_EQ(layer_of("weights.7"), "");
  EXPECT_EQ(layer_of("model.conv1d.weight"), "");
}

TEST(Names, ModuleDropsTheEndingWeight) {
  EXPECT_EQ(module_of("a.b.weight"), "a.b");
  EXPECT_EQ(module_of("a.b.bias"), "a.b.bias");
}

struct Glob {
  const char* pattern;
  const char* text;
  bool matches;
};

TEST(Names, GlobMatchesLikeAShell) {
  const Glob table[] = {
      {"", "", true},
      {"", "a", false},
      {"*", "", true},
      {"*", "a.b.c", true},
      {"a", "a", true},
      {"a", "ab", false},
      {"*.gate", "x.gate", true},
      {"*.gate", "x.gate_proj", false},
      {"*norm*", "input_layernorm", true},
      {"a?c", "abc", true},
      {"a?c", "ac", false},
      {"*a*b", "xaybzab", true},
      {"*a*b", "xaybza", false},
      {"**", "q", true},
      {"*ab", "aab", true},
      {"layers.?.q", "layers.1.q", true},
      {"layers.?.q", "layers.11.q", false},
  };
  for (const auto& row : table) EXPECT_EQ(glob_match(row.pattern, row.text), row.matches) << row.pattern << " " << row.text;
}

}  // namespace
}  // namespace nybble

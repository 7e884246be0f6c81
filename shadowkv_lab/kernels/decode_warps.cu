// MLA decode over FP8 rows for few heads: each group of GROUP warps works on tokens of its own.
//
// A program serves ROWS = 8 x GROUP query rows (heads, or heads of several query tokens) of one
// work item. With 8 rows a warp needs nobody else: it copies 16 tokens at a time into its own part
// of shared memory, scores them, and adds them to its own 512 x 8 outputs, 128 registers a thread;
// the warps meet once, at the end. With 16 or 32 rows, 2 or 4 warps share a tile of tokens: each
// scores its own 16 tokens and adds up 512 / GROUP output values over the tokens of all.
//
// Matrix operands move in units of 16 bits, here pairs of FP8 values. `ldmatrix` hands a thread
// four neighbouring values of a token for the scores (the order of a sum over values is free, so
// that the query is laid out to match), and, transposed, two values of two neighbouring tokens for
// the outputs: the first values of the pairs make rows 0 to 7 of an output tile, the second ones
// rows 8 to 15. Both are widened to FP16, which holds every e4m3 value exactly. Tokens (or latent
// values) are the rows of a matrix tile and query rows its eight columns: nothing is padded.
//
// Four more warps do nothing but copy, by the bulk copy engine: a bulk copy is issued by one thread
// at a time, which cost the computing warps a fifth of their time. Compiled by NVRTC at first use
// (kernels/nvrtc.py) for Hopper alone (wgmma, setmaxnreg). No headers.
//
// With EIGHT queries are rounded to e4m3. wgmma then multiplies FP8 for the scores: what `ldmatrix`
// gives is its operand as it is, and nothing is widened. Hopper has no such mma.sync (it becomes
// conversions and FP16, of the query too), so that 8 and 16 rows stay with FP16.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int ROWS = 8 * GROUP;  // query rows of a program
constexpr int WARPS = 8, GROUPS = WARPS / GROUP;
constexpr int RANK = 512, ROW = 576;
constexpr bool FP8 = EIGHT && GROUP == 4;  // scores by FP8 instructions
constexpr int DEPTH = FP8 ? 32 : 16;  // values of a row that a matrix instruction takes
constexpr int STEPS = ROW / DEPTH;
constexpr int OUT = RANK / 16 / GROUP;  // output tiles of a warp, 16 latent values each
// Where they begin, warp by warp, and how far one tile is from the next: a wgmma interleaves four.
constexpr int MINE = GROUP == 4 ? 16 : RANK / GROUP, NEXT = GROUP == 4 ? 64 : 16;
constexpr int CHAINS = GROUP == 4 ? 1 : 2;
constexpr int TOKENS = 16;              // that a warp scores at once
// Rows lie in pairs of 1,152 bytes with 16 between them, so that the eight rows of an ldmatrix are
// in different banks.
constexpr int STAGE = TOKENS * ROW + TOKENS / 2 * 16, STAGES = 2;
constexpr int SUM_PITCH = RANK + 4;
constexpr float LOWEST = -1e30f, MASKED = -3e38f;
constexpr float USUAL = 8, TOP = 15;  // powers of two that weights have at the peak, and at most

// Shared memory, in bytes. The sums of the end reuse the ring.
constexpr int AT_BACK = GROUPS * STAGES * 16;  // after the barriers
constexpr int AT_PEAK = AT_BACK + ROWS * 4;                  // [GROUPS][GROUP][ROWS]
constexpr int AT_MASS = AT_PEAK + WARPS * ROWS * 4;          // [WARPS][ROWS]
constexpr int AT_FACTOR = AT_MASS + WARPS * ROWS * 4;        // [GROUPS][ROWS]
constexpr int AT_WEIGHTS = AT_FACTOR + WARPS * ROWS * 4;     // [WARPS][GROUP][32] pairs of words
constexpr int AT_QUERY = AT_WEIGHTS + (GROUP > 1 ? WARPS * GROUP * 256 : 0);
constexpr int AT_RING = AT_QUERY + STEPS * ROWS * 32;
constexpr int SHARED = AT_RING + WARPS * STAGES * STAGE;
static_assert(GROUPS * ROWS * SUM_PITCH * 4 <= WARPS * STAGES * STAGE, "sums fit the ring");
static_assert(SHARED <= 232448 - 1024, "fits a Hopper multiprocessor");
static_assert(AT_RING % 16 == 0 && AT_QUERY % 16 == 0, "aligned");

extern "C" __constant__ int shared_bytes = SHARED;

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four e4m3 as two pairs of FP16, exactly.
__device__ __forceinline__ void widen(u32 four, u32& first, u32& second) {
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2;"
        "cvt.rn.f16x2.e4m3x2 %0, lo; cvt.rn.f16x2.e4m3x2 %1, hi; }"
        : "=r"(first), "=r"(second) : "r"(four));
}

__device__ __forceinline__ u32 half2(float lo, float hi) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(hi), "f"(lo));
    return both;
}

__device__ __forceinline__ u16 eight2(float lo, float hi) {  // e4m3, to nearest
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(hi), "f"(lo));
    return both;
}

__device__ __forceinline__ u32 half2(u16 eights) {
    u32 both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(eights));
    return both;
}

__device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ int row_at(int token) { return token * ROW + token / 2 * 16; }

// Barriers in shared memory (mbarrier), by their address.
__device__ __forceinline__ void init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
                 "@done bra over; bra again; over: }" :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const u8* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at));
}

__device__ __forceinline__ void load_transposed(u32 (&m)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at));
}

__device__ __forceinline__ void meet(int group) {  // of the warps of a group
    if (GROUP > 1)
        asm volatile("bar.sync %0, %1;" :: "r"(1 + group), "r"(32 * GROUP) : "memory");
}

__device__ __forceinline__ void meet_all() {  // of the eight warps that compute
    asm volatile("bar.sync 7, 256;" ::: "memory");
}

// Over the eight rows of a matrix tile.
__device__ __forceinline__ float column_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

__device__ __forceinline__ float column_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}

// wgmma: the tile of 64 rows that four warps hold in registers, 16 each, times 16 x 32 values in
// shared memory, in "core matrices" of 8 columns x 8 values of depth, 128 bytes each.
__device__ __forceinline__ void wgmma(float (*d)[4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same over FP8: 64 x 32 times 32 x 32.
__device__ __forceinline__ void wgmma8(float (*d)[4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Of 16 x 32 values (32 x 32 of FP8) at a shared address: the next 8 of depth 128 bytes on, the next 8 columns 256.
__device__ __forceinline__ u64 core_matrices(u32 address) {
    return (u64)(address >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

template <int LEFT> __device__ __forceinline__ void wgmma_commit() {  // and wait for all but LEFT
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

// What ordinary stores left in shared memory becomes visible to wgmma.
__device__ __forceinline__ void publish() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A tile of 8 x 8 FP16, transposed.
__device__ __forceinline__ u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// One program per tile of ROWS query rows (x) and work item (y): (request, first token, end,
// tokens of the request). Leaves its normalised output times `out_scale` in `result` [items, rows,
// 512], as BF16 or float32, and the maximum and sum of its softmax (base 2) in `stats` [items, rows,
// 2]. Where each request has one item, `result` is the attention's output itself.
extern "C" __global__ void __launch_bounds__(384, 1) warps_kernel(
    const u16* __restrict__ q_nope, const u16* __restrict__ q_pe, const u8* __restrict__ kv,
    void* __restrict__ result, float2* __restrict__ stats, const int* __restrict__ indptr,
    const int* __restrict__ pages, const int4* __restrict__ work, float sm_log2e,
    int rows, int heads, int page_shift, float out_scale, int bf16
) {
    extern __shared__ __align__(128) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 barriers = shared_address(shared), ring = shared_address(shared + AT_RING);
    auto full = [&](int group, int stage) { return barriers + (group * STAGES + stage) * 16; };
    auto empty = [&](int group, int stage) { return full(group, stage) + 8; };

    const int4 item = work[blockIdx.y];
    const int first = item.y, end = item.z, base = indptr[item.x];
    const int tiles = (end - first + TOKENS * GROUP - 1) / (TOKENS * GROUP);
    const int row0 = blockIdx.x * ROWS;
    if (threadIdx.x < GROUPS * STAGES)
        for (int i = 0; i < 2; i++) init(barriers + threadIdx.x * 16 + 8 * i, GROUP);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");

    if (warp >= WARPS) {  // Four warps copy, each for two of those that compute: 16 lanes a tile.
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int reader = (warp - WARPS) * 2 + lane / 16, row = lane % 16;
        const int group = reader / GROUP, member = reader % GROUP;
        const u32 to = ring + reader * STAGES * STAGE + row_at(row);
        // Past the end, the last token. Two rows of a page are copied at once.
        auto token_of = [&](int tile) { return first + (tile * GROUP + member) * TOKENS + row; };
        auto slot_of = [&](int tile) {
            const int token = min(token_of(tile), end - 1);
            const long long page = pages[base + (token >> page_shift)];
            return (page << page_shift) + (token & ((1 << page_shift) - 1));
        };
        long long slot = slot_of(group);
        for (int tile = group, turn = 0; tile < tiles; tile += GROUPS, turn++) {
            const int stage = turn % STAGES;
            const long long ahead = slot_of(tile + GROUPS);
            if (turn >= STAGES) wait(empty(group, stage), (turn / STAGES - 1) % 2);
            if (row == 0) expect(full(group, stage), TOKENS * ROW);
            __syncwarp(0xffff << lane / 16 * 16);
            const bool paired = page_shift && (token_of(tile) | 1) < end;
            if (!paired || row % 2 == 0)
                copy(to + stage * STAGE, kv + slot * ROW, paired ? 2 * ROW : ROW,
                     full(group, stage));
            slot = ahead;
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");

    float* back = (float*)(shared + AT_BACK);
    float* peaks = (float*)(shared + AT_PEAK);
    float* masses = (float*)(shared + AT_MASS);
    float* factors = (float*)(shared + AT_FACTOR);
    u32* query = (u32*)(shared + AT_QUERY);
    const int group = warp / GROUP, member = warp % GROUP, g = lane / 4, c = lane % 4;
    u32* group_weights = (u32*)(shared + AT_WEIGHTS) + group * GROUP * GROUP * 64;
    const u64 query_columns = core_matrices(shared_address(query));
    const u64 weight_columns = core_matrices(shared_address(group_weights));

    // Queries, scaled into FP16: each row by the power of two that puts its largest value just
    // below 2^16 (of FP8 2^8), exactly; its scores are scaled back in float32.
    for (int r = warp; r < ROWS; r += WARPS) {
        const bool real = row0 + r < rows;
        const long long at = (long long)item.x * rows + row0 + r;
        u32 words[9];
        float top = 0;
        for (int i = 0; i < 9; i++) {
            const u32* from = i < 8 ? (const u32*)(q_nope + at * RANK) + i * 32
                                    : (const u32*)(q_pe + at * (ROW - RANK));
            words[i] = real ? from[lane] : 0;
            top = fmaxf(top, fmaxf(fabsf(__uint_as_float(words[i] << 16)),
                                   fabsf(__uint_as_float(words[i] & 0xffff0000))));
        }
        for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        const int exponent = min(max((int)(__float_as_uint(top) >> 23) & 255, 30), 254);
        constexpr int TOP_BITS = EIGHT ? 7 : 15;
        const float up = __uint_as_float((254 + TOP_BITS - exponent) << 23);
        // Past 2^93 softmax is one-hot whatever the scale; the cap keeps its scores finite.
        if (lane == 0) back[r] = __uint_as_float((min(exponent, 220) - TOP_BITS) << 23) * sm_log2e;
        for (int i = 0; i < 9; i++) {
            // Of step k, thread (g, c) of column tile r / 8 wants values 4 c to 4 c + 3 of row g,
            // in two words of FP16, or those of both halves of the step, in two words of FP8.
            const int value = 2 * (i * 32 + lane), step = value / DEPTH, c = value % 16 / 4;
            const int part = FP8 ? value % 32 / 16 : value / 2 % 2;
            const int word = GROUP == 4
                ? step * 256 + r / 8 * 64 + part * 32 + r % 8 * 4 + c
                : (step * 32 + r % 8 * 4 + c) * 2 * GROUP + r / 8 * 2 + part;
            const float x = __uint_as_float(words[i] << 16) * up;
            const float y = __uint_as_float(words[i] & 0xffff0000) * up;
            if (FP8)
                ((u16*)query)[word * 2 + value / 2 % 2] = eight2(x, y);
            else
                query[word] = EIGHT ? half2(eight2(x, y)) : half2(x, y);
        }
    }
    if (GROUP == 4) publish();
    meet_all();

    float out[OUT][GROUP][4] = {};
    // Of the two query rows of each column tile that this thread holds: n * 8 + 2 * c + e.
    float peak[GROUP][2], mass[GROUP][2], scale[GROUP][2];
    int limit[GROUP][2];
    for (int n = 0; n < GROUP; n++)
        for (int e = 0; e < 2; e++) {
            const int r = n * 8 + 2 * c + e;
            peak[n][e] = LOWEST, mass[n][e] = 0, scale[n][e] = back[r];
            // Query token i of q sees all but the last q - 1 - i tokens.
            limit[n][e] = min(end, item.w - (rows - 1 - min(row0 + r, rows - 1)) / heads);
        }
    // Where this lane's rows of ldmatrix begin, in a stage.
    const u32 score_row = row_at(lane % 16) + lane / 16 * 16;
    const u32 value_row = row_at(lane % 16) + member * MINE + lane / 16 * NEXT;

    for (int tile = group, turn = 0; tile < tiles; tile += GROUPS, turn++) {
        const int stage = turn % STAGES;
        const u32 tokens = ring + (group * GROUP * STAGES + stage) * STAGE;  // of member 0
        const u32 at = tokens + member * STAGES * STAGE + score_row;
        wait(full(group, stage), turn / STAGES % 2);

        // Scores. What shared memory has to give is asked for a turn early. With mma.sync there are
        // two chains of sums, so that the matrix units need not wait.
        float s[CHAINS][GROUP][4] = {};
        u32 m[2][2][4];     // as they come from shared memory: of four steps, and the next four
        u32 wide[2][4][4];  // widened: of four steps, and of the four before
        load_matrices(m[0][0], at), load_matrices(m[0][1], at + 32);
#pragma unroll
        for (int step = 0; step < ROW / 16; step += 4) {  // of 16 values
            u32 (&now)[4][4] = wide[step / 4 % 2];
            u32 (&have)[2][4] = m[step / 4 % 2];
            u32 (&want)[2][4] = m[(step / 4 + 1) % 2];
            if (step + 4 < ROW / 16) {
                load_matrices(want[0], at + (step + 4) * 16);
                load_matrices(want[1], at + (step + 6) * 16);
            }
            if constexpr (FP8) {
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 2; i++)
                    wgmma8(s[0], have[i], query_columns + (step / 2 + i) * (1024 >> 4));
                wgmma_commit<0>();  // the next turn loads what this one multiplies
                continue;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                widen(have[i / 2][i % 2 * 2], now[i][0], now[i][2]);
                widen(have[i / 2][i % 2 * 2 + 1], now[i][1], now[i][3]);
            }
            if constexpr (GROUP == 4) wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if constexpr (GROUP == 4) {
                    wgmma(s[0], now[i], query_columns + (step + i) * (1024 >> 4));
                } else {
                    const uint2* q = (const uint2*)query + ((step + i) * 32 + lane) * GROUP;
#pragma unroll
                    for (int n = 0; n < GROUP; n++) mma(s[i % CHAINS][n], now[i], q[n].x, q[n].y);
                }
            }
            if constexpr (GROUP == 4)
                step + 4 < ROW / 16 ? wgmma_commit<1>() : wgmma_commit<0>();
        }

        if (CHAINS == 2)
#pragma unroll
            for (int n = 0; n < GROUP; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[0][n][e] += s[CHAINS - 1][n][e];
        // s[0][n][e] is of token g and query row e of this thread's two, s[0][n][2 + e] of g + 8.
        const int token = first + (tile * GROUP + member) * TOKENS + g;
        float most[GROUP][2];
#pragma unroll
        for (int n = 0; n < GROUP; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& x = s[0][n][e];
                float& y = s[0][n][2 + e];
                x = token < limit[n][e] ? x * scale[n][e] : MASKED;
                y = token + 8 < limit[n][e] ? y * scale[n][e] : MASKED;
                most[n][e] = column_max(fmaxf(x, y));
            }
        if (GROUP > 1) {
            if (g == 0)
#pragma unroll
                for (int n = 0; n < GROUP; n++)
                    *(float2*)(peaks + warp * ROWS + n * 8 + 2 * c) = {most[n][0], most[n][1]};
            meet(group);
#pragma unroll
            for (int n = 0; n < GROUP; n++)
#pragma unroll
                for (int w = 0; w < GROUP; w++) {
                    const float2 theirs =
                        *(float2*)(peaks + (group * GROUP + w) * ROWS + n * 8 + 2 * c);
                    most[n][0] = fmaxf(most[n][0], theirs.x);
                    most[n][1] = fmaxf(most[n][1], theirs.y);
                }
        }
        // Weights of up to 2^15, not 1: FP16 then keeps eleven bits of far smaller ones. The peak
        // that they refer to, at 2^8, moves only when a score passes 2^15: outputs so far then
        // shrink, which happens a few times in a request and not in every tile.
        bool moves = false;
#pragma unroll
        for (int n = 0; n < GROUP; n++)
            for (int e = 0; e < 2; e++) moves |= most[n][e] > peak[n][e] + (TOP - USUAL);
        if (__any_sync(~0u, moves)) {
#pragma unroll
            for (int n = 0; n < GROUP; n++) {
                float shrink[2];
                for (int e = 0; e < 2; e++) {
                    const float highest = fmaxf(peak[n][e], most[n][e]);
                    shrink[e] = exp2(peak[n][e] - highest);
                    peak[n][e] = highest;
                    mass[n][e] *= shrink[e];
                }
#pragma unroll
                for (int i = 0; i < OUT; i++) {
                    out[i][n][0] *= shrink[0], out[i][n][1] *= shrink[1];
                    out[i][n][2] *= shrink[0], out[i][n][3] *= shrink[1];
                }
            }
        }
        u32 weights[GROUP][2];
#pragma unroll
        for (int n = 0; n < GROUP; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float x = exp2(s[0][n][2 * half] - peak[n][0] + USUAL);
                const float y = exp2(s[0][n][2 * half + 1] - peak[n][1] + USUAL);
                mass[n][0] += x, mass[n][1] += y;
                weights[n][half] = transposed(half2(x, y));
            }

        // Outputs: the tokens of every warp of the group, this warp's part of the latent values.
        if (GROUP > 1) {
            u32* mine = group_weights + member * GROUP * 64 + lane;
#pragma unroll
            for (int n = 0; n < GROUP; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    mine[(n * 2 + half) * 32] = weights[n][half];
            if (GROUP == 4) publish();
            meet(group);
        }
        const u32 values = tokens + value_row;
        load_transposed(m[0][0], values), load_transposed(m[0][1], values + 2 * NEXT);
#pragma unroll(GROUP == 2 ? 1 : GROUP)
        for (int w = 0; w < GROUP; w++) {
            const u32* theirs = group_weights + w * GROUP * 64 + lane;
            if (GROUP == 2)
#pragma unroll
                for (int n = 0; n < GROUP; n++)
                    weights[n][0] = theirs[n * 64], weights[n][1] = theirs[n * 64 + 32];
#pragma unroll
            for (int i = 0; i < OUT; i += 4) {
                u32 (&now)[4][4] = wide[i / 4 % 2];
                u32 (&have)[2][4] = m[i / 4 % 2];
                u32 (&want)[2][4] = m[(i / 4 + 1) % 2];
                const int following = i + 4 < OUT ? w : w + 1;
                if (following < GROUP) {
                    const u32 from = values + following * STAGES * STAGE + (i + 4) % OUT * NEXT;
                    load_transposed(want[0], from), load_transposed(want[1], from + 2 * NEXT);
                }
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int k = 0; k < 2; k++)
                        widen(__byte_perm(have[j / 2][j % 2 * 2 + k], 0, 0x3120), now[j][2 * k],
                              now[j][2 * k + 1]);
                if constexpr (GROUP == 4) wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if constexpr (GROUP == 4)
                        wgmma(out[i + j], now[j], weight_columns + w * (1024 >> 4));
                    else
#pragma unroll
                        for (int n = 0; n < GROUP; n++)
                            mma(out[i + j][n], now[j], weights[n][0], weights[n][1]);
                if constexpr (GROUP == 4)
                    w < 3 || i + 4 < OUT ? wgmma_commit<1>() : wgmma_commit<0>();
            }
        }
        __syncwarp();
        if (lane == 0) arrive(empty(group, stage));
    }

    // The groups' outputs together, normalised.
    const int active = min(GROUPS, tiles);
#pragma unroll
    for (int n = 0; n < GROUP; n++) {
        const float x = column_sum(mass[n][0]), y = column_sum(mass[n][1]);
        if (g == 0) {
            *(float2*)(peaks + warp * ROWS + n * 8 + 2 * c) = {peak[n][0], peak[n][1]};
            *(float2*)(masses + warp * ROWS + n * 8 + 2 * c) = {x, y};
        }
    }
    meet_all();
    if (threadIdx.x < ROWS) {
        const int r = threadIdx.x;
        float highest = LOWEST, total = 0;
        for (int i = 0; i < active; i++) highest = fmaxf(highest, peaks[i * GROUP * ROWS + r]);
        for (int i = 0; i < active * GROUP; i++)
            total += masses[i * ROWS + r] * exp2(peaks[i * ROWS + r] - highest);
        for (int i = 0; i < active; i++)
            factors[i * ROWS + r] =
                total > 0 ? exp2(peaks[i * GROUP * ROWS + r] - highest) / total * out_scale
                          : 0;
        if (row0 + r < rows) stats[(long long)blockIdx.y * rows + row0 + r] = {highest, total};
    }
    meet_all();
    const long long first_out = ((long long)blockIdx.y * rows + row0) * RANK;
    auto put = [&](int r, int value, float x, float y) {  // two neighbouring values of a row
        if (row0 + r >= rows) return;
        const long long at = first_out + r * RANK + value;
        if (bf16) {
            u32 both;
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
            *(u32*)((u16*)result + at) = both;
        } else {
            *(float2*)((float*)result + at) = {x, y};
        }
    };
    float* sums = (float*)(shared + AT_RING);
    if (group < active) {
#pragma unroll
        for (int n = 0; n < GROUP; n++) {
            const int r = n * 8 + 2 * c;
            const float x = factors[group * ROWS + r], y = factors[group * ROWS + r + 1];
#pragma unroll
            for (int i = 0; i < OUT; i++) {
                const int value = member * MINE + i * NEXT + 2 * g;
                const float2 lower = {out[i][n][0] * x, out[i][n][2] * x};
                const float2 upper = {out[i][n][1] * y, out[i][n][3] * y};
                if (active == 1) {
                    put(r, value, lower.x, lower.y);
                    put(r + 1, value, upper.x, upper.y);
                } else {
                    float* mine = sums + (group * ROWS + r) * SUM_PITCH + value;
                    *(float2*)mine = lower;
                    *(float2*)(mine + SUM_PITCH) = upper;
                }
            }
        }
    }
    if (active == 1) return;
    meet_all();
    for (int at = threadIdx.x; at < ROWS * RANK / 4; at += 256) {
        const int r = at / (RANK / 4), value = at % (RANK / 4) * 4;
        float4 sum = {0, 0, 0, 0};
        for (int i = 0; i < active; i++) {
            const float4 part = *(const float4*)(sums + (i * ROWS + r) * SUM_PITCH + value);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        put(r, value, sum.x, sum.y);
        put(r, value + 2, sum.z, sum.w);
    }
}

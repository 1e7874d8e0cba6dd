//go:build !nolinkname

#include "textflag.h"
#include "go_asm.h"

GLOBL ·crossC(SB), NOPTR|RODATA, $8
DATA ·crossC(SB)/8, $cross(SB)

GLOBL ·passC(SB), NOPTR|RODATA, $8
DATA ·passC(SB)/8, $pass(SB)

// int pass(passage *) in the C convention, on the system stack. After the call it does not
// read the passage, which lies on the goroutine's stack: that stack may have moved if C has
// called Go.
TEXT pass(SB), NOSPLIT, $16
	MOVQ passage_fn(DI), R10
	MOVQ (passage_words+48)(DI), R11
	MOVQ R11, 0(SP)
	MOVQ (passage_words+56)(DI), R11
	MOVQ R11, 8(SP)
	MOVQ (passage_words+8)(DI), SI
	MOVQ (passage_words+16)(DI), DX
	MOVQ (passage_words+24)(DI), CX
	MOVQ (passage_words+32)(DI), R8
	MOVQ (passage_words+40)(DI), R9
	MOVQ passage_words+0(DI), DI
	XORL AX, AX // a variadic function gets no floats
	CALL R10
	RET

// void cross(crossing *) in the C convention, on the system stack. It makes the
// calls that the crossing describes. The first 26 words of the frame are
// arguments on the stack, the 28th is the crossing's address.
TEXT cross(SB), NOSPLIT, $224
	MOVQ DI, 216(SP)
	MOVQ DI, R11
	// Missing arguments are zeros, not leftover data.
	XORPS X0, X0
	MOVUPS X0, 0(SP)
	MOVUPS X0, 16(SP)
	MOVUPS X0, 32(SP)
	MOVUPS X0, 48(SP)
	MOVUPS X0, 64(SP)
	MOVUPS X0, 80(SP)
	MOVUPS X0, 96(SP)
	MOVUPS X0, 112(SP)
	MOVUPS X0, 128(SP)
	MOVUPS X0, 144(SP)
	MOVUPS X0, 160(SP)
	MOVUPS X0, 176(SP)
	MOVUPS X0, 192(SP)
	MOVQ crossing_before(R11), R10
	TESTQ R10, R10
	JZ   stack
	MOVQ crossing_subject(R11), DI
	XORL SI, SI
	XORL DX, DX
	XORL CX, CX
	XORL R8, R8
	XORL R9, R9
	XORL AX, AX
	CALL R10
	MOVQ 216(SP), R11
	TESTL AX, AX
	JNZ  done

stack:
	MOVQ crossing_nwords(R11), CX
	SUBQ $6, CX
	JLE  registers
	LEAQ (crossing_words+48)(R11), R8
	MOVQ SP, R9

copy:
	MOVQ (R8), R10
	MOVQ R10, (R9)
	ADDQ $8, R8
	ADDQ $8, R9
	DECQ CX
	JNZ  copy

registers:
	MOVQ crossing_words+0(R11), DI
	MOVQ (crossing_words+8)(R11), SI
	MOVQ (crossing_words+16)(R11), DX
	MOVQ (crossing_words+24)(R11), CX
	MOVQ (crossing_words+32)(R11), R8
	MOVQ (crossing_words+40)(R11), R9
	MOVQ crossing_fn(R11), R10
	XORL AX, AX // a variadic function gets no floats
	CALL R10
	MOVQ 216(SP), R11

done:
	MOVQ AX, crossing_result(R11)
	XORL AX, AX
	RET

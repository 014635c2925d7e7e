"""The arithmetic of the acceptance rules, by hand; `specjax.testing` drives it through every outcome."""

import jax.numpy as jnp
import numpy as np

from specjax import verify


def test_residual_values():
    law = verify.residual(jnp.array([0.1, 0.6, 0.3]), jnp.array([0.6, 0.2, 0.2]))
    np.testing.assert_allclose(law, [0, 0.8, 0.2], atol=1e-6)
    law = verify.residual(jnp.array([0.5, 0.5]), jnp.array([0.2, 0.8]), 0.5)
    np.testing.assert_allclose(law, [1, 0], atol=1e-6)
    same = jnp.array([[0.3, 0.7], [0.5, 0.5]])
    np.testing.assert_array_equal(verify.residual(same, same), same)
    batch = verify.residual(same, jnp.array([[0.3, 0.7], [1, 0]]), jnp.array([[1.0], [0.5]]))
    np.testing.assert_allclose(batch, [[0.3, 0.7], [0, 1]], atol=1e-6)


def test_acceptance_values():
    p, q = jnp.array([0.1, 0.6, 0.0, 0.4, 0.0]), jnp.array([0.6, 0.2, 0.5, 0.0, 0.0])
    np.testing.assert_allclose(verify.acceptance(p, q), [1 / 6, 1, 0, 0, 0], rtol=1e-6)


def test_joint_ratios_are_capped_on_the_way():
    found = verify.joint_ratios(jnp.array([[0.9, 0.2, 0.5, 0.3]]), jnp.array([[0.3, 0.4, 0.25, 0.0]]))
    np.testing.assert_allclose(found, [[1, 0.5, 1, 0]], rtol=1e-6)
    assert verify.joint_ratios(jnp.ones((2, 0)), jnp.ones((2, 0))).shape == (2, 0)

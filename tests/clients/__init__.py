import pytest

pytest.register_assert_rewrite("tests.clients.exported")  # its assertions say what differs, as those of tests do
